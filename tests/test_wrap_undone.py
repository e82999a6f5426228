"""A wrapped module is still itself: copies, pickles, state, and what `unwrap` gives back."""

import copy
import inspect
import pickle
import sys
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

import ulysses
from tests.wrapped_models import DIM, HEADS, Decoder, TakesFunction, own_function, tokens
from ulysses.wrapping import wrapping_of


def _out_of_two(module: nn.Module) -> Tensor:
    """This rank's part, gathered."""
    part = [ulysses.shard_sequence(each, dist.group.WORLD) for each in tokens(7)]
    return ulysses.gather_sequence_slice_grads(module(*part).detach(), dist.group.WORLD)


def _copies(rank: int, num_ranks: int) -> None:
    plain = Decoder()
    expected = plain(*tokens(7)).detach()
    keys, signature = list(plain.state_dict()), inspect.signature(plain.forward)
    module = ulysses.wrap(copy.deepcopy(plain), dist.group.WORLD)
    assert type(module) is Decoder
    assert list(module.state_dict()) == keys
    assert inspect.signature(module.forward) == signature
    module.load_state_dict(plain.state_dict())

    duplicate = copy.deepcopy(module)
    assert wrapping_of(duplicate) is wrapping_of(module)
    assert duplicate.layers[0].attention.forward.__self__ is duplicate.layers[0].attention
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    torch.testing.assert_close(_out_of_two(duplicate), expected)

    pickled = pickle.loads(pickle.dumps(duplicate))
    assert not [part for part in pickled.modules() if wrapping_of(part)]
    assert torch.equal(pickled(*tokens(7)), expected)

    ulysses.unwrap(duplicate)
    assert not [part for part in duplicate.modules() if "forward" in vars(part)]
    assert torch.equal(duplicate(*tokens(7)), expected)


def test_copies_are_wrapped_and_pickles_are_not(pool):
    pool(2).run(_copies)


def test_a_pickle_needs_no_ulysses(tmp_path, monkeypatch) -> None:
    layer = ulysses.wrap(nn.TransformerEncoderLayer(DIM, HEADS, 8, batch_first=True), None)
    torch.save(layer, tmp_path / "layer")
    for name in [name for name in sys.modules if name.split(".")[0] == "ulysses"]:
        monkeypatch.setitem(sys.modules, name, None)  # importing it now raises
    plain = torch.load(tmp_path / "layer", weights_only=False)
    assert plain(torch.zeros(1, 2, DIM)).shape == (1, 2, DIM)


def test_copies_of_a_wrapped_function() -> None:
    module = TakesFunction(ulysses.wrap_function(own_function, None))
    assert copy.deepcopy(module).function is module.function
    assert module.function.__name__ == "own_function"
    assert pickle.loads(pickle.dumps(module)).function is own_function
    ulysses.wrap(module, None)
    x = torch.randn(2, 5, DIM)
    assert torch.equal(module(x), TakesFunction.forward(pickle.loads(pickle.dumps(module)), x))


class Fails(Decoder):
    """Raises what it is told to behind its first layer."""

    error: BaseException | None = None

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        out = super().forward(ids, positions)
        if self.error:
            raise self.error
        return out


@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt()])
def test_a_failing_forward_leaves_nothing_behind(error: BaseException) -> None:
    module = ulysses.wrap(Fails(), None)
    module(*tokens(5))
    module.error = error
    with pytest.raises(type(error)):
        module(*tokens(5))
    assert not torch.overrides._get_current_function_mode_stack()
    module.error = None
    module(*tokens(5))


def test_nothing_but_the_module_is_touched() -> None:
    """Another of its class, and SDPA itself, beside a wrapped one, in another thread inside it."""
    other, sizes = Decoder(), []

    class Spies(Decoder):
        def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
            thread = threading.Thread(target=elsewhere)
            thread.start()
            thread.join()
            return super().forward(ids, positions)

    def elsewhere() -> None:
        sizes.append(len(torch.overrides._get_current_function_mode_stack()))
        other(*tokens(5))

    module = ulysses.wrap(Spies(), None)
    seen: dict[str, Any] = wrapping_of(module).seen
    module(*tokens(5))
    assert sizes == [0] * len(sizes)
    assert seen.keys() == {"layers.0.attention", "layers.1.attention"}
    assert torch.nn.functional.scaled_dot_product_attention is scaled_dot_product_attention


class Nests(nn.Module):
    """Calls a wrapped module that is none of its own parts, in between its own attention."""

    def __init__(self, guest: nn.Module) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(DIM, HEADS, batch_first=True)
        self.guest = [guest]

    def forward(self, x: Tensor) -> Tensor:
        return self.attend(x, x, x)[0] + self.guest[0](x)


def _nested(rank: int, num_ranks: int) -> None:
    guest = nn.TransformerEncoderLayer(DIM, HEADS, 8, 0.0, batch_first=True).eval()
    host = Nests(guest)
    x = torch.randn(2, 7, DIM, generator=torch.Generator().manual_seed(1))
    expected = host(x).detach()
    ulysses.wrap(guest, dist.group.WORLD)
    ulysses.wrap(host, dist.group.WORLD)
    out = host(ulysses.shard_sequence(x, dist.group.WORLD)).detach()
    out = ulysses.gather_sequence_slice_grads(out, dist.group.WORLD)
    torch.testing.assert_close(out, expected)


def test_one_wrapped_module_inside_another(pool):
    pool(2).run(_nested)


def _fused_path(rank: int, num_ranks: int) -> None:
    """Inference of torch's encoder, which has a kernel of its own for that, and of one layer."""
    layer = nn.TransformerEncoderLayer(DIM, HEADS, 8, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    x = torch.randn(2, 7, DIM, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected, of_one = encoder(x), encoder.layers[1](x)
        ulysses.wrap(encoder, dist.group.WORLD)
        part = ulysses.shard_sequence(x, dist.group.WORLD)
        for module, whole in ((encoder, expected), (encoder.layers[1], of_one)):
            own = ulysses.shard_sequence(whole, dist.group.WORLD)
            torch.testing.assert_close(module(part), own)


def test_torch_s_fused_encoder_layer_is_not_taken(pool):
    pool(2).run(_fused_path)


def test_the_table_says_what_was_found_and_done() -> None:
    module = Decoder()
    assert str(ulysses.describe(module)).splitlines() == [
        "Decoder, not wrapped",
        "module              class          route  attention  heads  kv heads  mask",
        "layers.0.attention  SelfAttention  sdpa   exchanged  ?      ?         ?",
        "layers.1.attention  SelfAttention  sdpa   exchanged  ?      ?         ?",
    ]
    ulysses.wrap(module, None)(*tokens(5))
    table = ulysses.describe(module)
    assert table.wrapped
    row = table.rows[0]
    assert (row.num_heads, row.num_kv_heads, row.mask) == (6, 2, "causal")
