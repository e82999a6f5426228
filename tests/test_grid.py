"""The choice of a grid, without processes: every rank computes it alike."""

import logging

import pytest
import torch

from ulysses.backends.base import Band
from ulysses.backends.sdpa import SdpaAttention
from ulysses.call import Call
from ulysses.grid import plan
from ulysses.structure import one_band
from ulysses.tiling import shard_lengths


class _NoMasks(SdpaAttention):
    """A kernel that has every band as a flag, as Ascend's have."""

    def materialises(self, problem):
        return False


def _call(heads, kv_heads, ranks, band=None, length=1024, **changes):
    lens = shard_lengths(length, ranks)
    options = {
        "batch": 1,
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": 64,
        "value_dim": 64,
        "query_lens": lens,
        "key_lens": lens,
        "dtype": torch.bfloat16,
        "device_type": "cpu",
        "requires_grad": False,
        "structure": one_band(length, length, band or Band()),
        "dropout_p": 0.0,
    }
    return Call(**{**options, **changes})


CAUSAL = Band(None, 0)
WINDOW = Band(-15, 0)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "ranks", "band", "expected"),
    [
        (20, 20, 4, None, (4, 1)),  # Ulysses sends fewest bytes
        (32, 8, 4, None, (1, 4)),  # K/V gather wins up to P = 1 + H/Hkv = 5 ...
        (32, 8, 8, None, (8, 1)),  # ... and loses beyond
        (8, 1, 4, None, (1, 4)),  # MQA: always
        (16, 16, 2, None, (2, 1)),  # equal bytes: Ulysses
        (6, 6, 4, None, (2, 2)),  # 6 heads are not level on 4 ranks, 3 and 3 on 2 are
        (2, 2, 8, None, (2, 4)),  # more ranks than heads
        (1, 1, 4, None, (1, 4)),
        (4, 4, 4, WINDOW, (1, 4)),  # a halo, not the sequence
    ],
)
def test_bytes_decide_among_level_grids(heads, kv_heads, ranks, band, expected):
    assert plan(_call(heads, kv_heads, ranks, band), _NoMasks(), None).grid == expected


def test_a_kernel_that_would_build_a_mask_keeps_whole_heads():
    """Causal row blocks cost SDPA a mask: (1, 2) sends fewer bytes here and is not taken."""
    call = _call(12, 1, 2, CAUSAL)
    assert plan(call, SdpaAttention(), None).grid == (2, 1)
    assert plan(call, _NoMasks(), None).grid == (1, 2)


def test_where_no_grid_is_level_and_free_of_masks_the_largest_tile_decides():
    """9 heads on 2 ranks: 5 and 4 heads cost 1.11, a masked half costs 1.57."""
    assert plan(_call(9, 3, 2, CAUSAL), SdpaAttention(), None).grid == (2, 1)
    assert plan(_call(1, 1, 8, CAUSAL), SdpaAttention(), None).grid == (1, 8)


def test_a_grid_that_the_kernel_refuses_is_not_chosen():
    class AtMostFourHeads(_NoMasks):
        def unsupported(self, problem):
            return "too many heads" if problem.num_heads > 4 else None

    assert plan(_call(16, 4, 4), AtMostFourHeads(), None).grid == (4, 1)
    with pytest.raises(ValueError, match=r"'sdpa' can not run grid .*too many heads"):
        plan(_call(32, 4, 4), AtMostFourHeads(), None)


def test_the_choice_is_logged_once(caplog):
    call, kernel = _call(20, 20, 4, length=1040), SdpaAttention()
    with caplog.at_level(logging.INFO, logger="ulysses"):
        for _ in range(3):
            plan(call, kernel, None)
    assert [record.message.split(" for ")[0] for record in caplog.records] == ["grid (u=4, r=1)"]
