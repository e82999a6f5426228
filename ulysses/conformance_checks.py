"""One kernel under test, and the checks that compare it with the reference."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ulysses.backends.base import Band, Dropout, LocalAttention
from ulysses.conformance import CASES, SIZES, Case, reference_attention
from ulysses.conformance_added import Added

_NAMES = ("query", "key", "value")
_PLAIN = SIZES[0]


class Refused(Exception):
    """The kernel refused the problem beforehand, and the call as well."""


@dataclass(frozen=True, slots=True)
class Subject:
    """A kernel on one device in one dtype. Each check raises AssertionError or Refused."""

    kernel: LocalAttention
    device: torch.device
    dtype: torch.dtype

    def check_forward(self, case: Case) -> None:
        """Values without gradients, twice, leaving the inputs alone."""
        tensors = case.tensors(self.dtype, self.device)
        expected, _ = _reference(case, tensors)
        with torch.no_grad():
            with self._unmodified(tensors):
                out = self.attend(case, tensors)
            self.compare("output", out, expected)
            self.compare("output of a second call", self.attend(case, tensors), expected)
        assert not out.requires_grad, "output requires a gradient though gradients are disabled"

    def check_backward(self, case: Case, wanted: tuple[bool, bool, bool] = (True,) * 3) -> None:
        """Values and the gradient of each wanted input, for a random upstream gradient."""
        tensors = case.tensors(self.dtype, self.device)
        with self._unmodified(tensors):
            out, leaves, added = self._with_leaves(case, tensors, wanted)
            upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
            self._compare_gradients(case, out, leaves, added, upstream.to(out))

    def check_partial_gradients(self) -> None:
        """A frozen input stays without a gradient, and the others keep theirs."""
        for wanted in ((True, False, False), (False, True, False), (False, False, True)):
            self.check_backward(replace(_PLAIN, band=Band(None, 0)), wanted)

    def check_expanded_upstream(self) -> None:
        """The gradient of `.sum()` is one element with stride 0 everywhere."""
        case = replace(_PLAIN, num_kv_heads=2, batch=2)
        tensors = case.tensors(self.dtype, self.device)
        out, leaves, added = self._with_leaves(case, tensors, (True, True, True))
        upstream = torch.ones((), dtype=out.dtype, device=out.device).expand_as(out)
        self._compare_gradients(case, out, leaves, added, upstream)

    def check_head_counts_in_turn(self) -> None:
        """Two layers share the kernel: a head count kept from one call would spoil the next."""
        few, many = replace(_PLAIN, num_heads=2, num_kv_heads=1), replace(_PLAIN, num_heads=12)
        for case in (few, many, few):
            self.check_forward(case)
            self.check_backward(case)

    def check_mask_claims(self) -> None:
        """`materialises` is a plain bool, and where it is false no Sq x Sk mask is made.

        Where the caller has made one already there is nothing to see.
        """
        for case in self._accepted_cases():
            claim = self.kernel.materialises(
                case.problem(self.dtype, self.device.type, requires_grad=False)
            )
            assert isinstance(claim, bool), f"materialises gave {claim!r} for {case.name}"
            has_mask = case.bool_mask or case.float_mask
            if not (claim or has_mask) and min(case.num_queries, case.num_keys) > 1:
                tensors = case.tensors(self.dtype, self.device)
                with torch.no_grad(), _MaskWatch(case) as watch:
                    self.attend(case, tensors)
                assert not watch.seen, f"a mask {watch.seen[0]} was made for {case.name}"

    def check_log_sum_exp(self) -> None:
        """Kernels that offer `attend_with_lse`: natural logarithm, -inf where nothing is seen."""
        if not hasattr(self.kernel, "attend_with_lse"):
            raise Refused("it has no attend_with_lse")
        for case in self._accepted_cases():
            tensors = case.tensors(self.dtype, self.device)
            with torch.no_grad():
                out, lse = self.kernel.attend_with_lse(
                    *tensors,
                    band=case.band,
                    scale=case.scale,
                    **case.added(self.dtype, self.device).arguments,
                )
            expected, expected_lse = _reference(case, tensors)
            self.compare(f"output of {case.name}", out, expected)
            assert lse.dtype in (torch.float32, torch.float64), f"log-sum-exp is {lse.dtype}"
            self.compare(f"log-sum-exp of {case.name}", lse, expected_lse, like=lse.dtype)

    def attend(
        self,
        case: Case,
        tensors: tuple[Tensor, ...],
        dropout: Dropout | None = None,
        added: Added | None = None,
    ) -> Tensor:
        """Call the kernel; if it refuses the problem, see that it refuses the call as well."""
        added = added or case.added(self.dtype, self.device)
        learned = (*tensors, *added.learned.values())
        requires_grad = torch.is_grad_enabled() and any(t.requires_grad for t in learned)
        query, key, value = tensors

        def call() -> Tensor:
            options: dict[str, Any] = {"dropout": dropout, **added.arguments}
            return self.kernel(query, key, value, band=case.band, scale=case.scale, **options)

        try:
            self.expect_accepted(
                case, requires_grad=requires_grad, dropout_p=dropout.p if dropout else 0.0
            )
        except Refused as refusal:
            with contextlib.suppress(ValueError, NotImplementedError, RuntimeError, TypeError):
                call()
                raise AssertionError(
                    f"it ran what `unsupported` had refused with {str(refusal)!r}"
                ) from None
            raise
        out = call()
        assert out.dtype == self.dtype, f"output is {out.dtype}, expected {self.dtype}"
        return out

    def compare(
        self, what: str, found: Tensor, expected: Tensor, like: torch.dtype | None = None
    ) -> None:
        """Shape and values, within the bound of this dtype."""
        assert found.shape == expected.shape, (
            f"{what} has shape {tuple(found.shape)}, expected {tuple(expected.shape)}"
        )
        found, expected = found.detach().cpu().double(), expected.detach().cpu().double()
        finite = expected.isfinite()
        assert torch.equal(found[~finite], expected[~finite]), (
            f"{what}: expected -inf where no key is seen"
        )
        found, expected = found[finite], expected[finite]
        if not expected.numel():
            return
        error = (found - expected).abs().max().item()
        bound = _bound(self.dtype if like is None else max(self.dtype, like, key=_bound))
        bound *= max(1.0, expected.abs().max().item())
        assert error <= bound, f"{what} is off by {error:.3g}, more than {bound:.3g}"

    @contextlib.contextmanager
    def _unmodified(self, tensors: tuple[Tensor, ...]) -> Iterator[None]:
        before = [tensor.clone() for tensor in tensors]
        yield
        for name, tensor, copy in zip(_NAMES, tensors, before, strict=True):
            assert torch.equal(tensor, copy), f"{name} was modified"

    def _with_leaves(
        self, case: Case, tensors: tuple[Tensor, ...], wanted: tuple[bool, bool, bool]
    ) -> tuple[Tensor, tuple[Tensor, ...], Added]:
        """The output, and what it is differentiated by: of the tensors, those that are wanted."""
        leaves = tuple(
            tensor.detach().requires_grad_(want)
            for tensor, want in zip(tensors, wanted, strict=True)
        )
        added = case.added(self.dtype, self.device).as_leaves
        out = self.attend(case, leaves, added=added)
        assert out.requires_grad, "output has no gradient though an input requires one"
        return out, leaves, added

    def _compare_gradients(
        self, case: Case, out: Tensor, leaves: tuple[Tensor, ...], added: Added, upstream: Tensor
    ) -> None:
        inputs = dict(zip(_NAMES, leaves, strict=True)) | added.learned
        inputs = {name: leaf for name, leaf in inputs.items() if leaf.requires_grad}
        found = torch.autograd.grad(out, list(inputs.values()), upstream, allow_unused=True)
        exact = tuple(leaf.detach().cpu().double().requires_grad_() for leaf in leaves)
        exact_added = added.on_cpu.changed(torch.Tensor.double).as_leaves
        expected, _ = reference_attention(
            *exact, band=case.band, scale=case.scale, added=exact_added
        )
        self.compare("output", out, expected)
        exact_inputs = dict(zip(_NAMES, exact, strict=True)) | exact_added.learned
        true = torch.autograd.grad(
            expected, [exact_inputs[name] for name in inputs], upstream.cpu().double()
        )
        for name, gradient, true_gradient in zip(inputs, found, true, strict=True):
            assert gradient is not None, f"gradient of {name} is missing"
            self.compare(f"gradient of {name}", gradient, true_gradient)

    def _accepted_cases(self) -> list[Case]:
        """The cases that the kernel takes without gradients, or Refused if there are none."""
        problems = (
            case.problem(self.dtype, self.device.type, requires_grad=False) for case in CASES
        )
        reasons = [self.kernel.unsupported(problem) for problem in problems]
        accepted = [case for case, why in zip(CASES, reasons, strict=True) if why is None]
        if not accepted:
            raise Refused(reasons[0])
        return accepted

    def expect_accepted(self, case: Case, *, requires_grad: bool, dropout_p: float = 0.0) -> None:
        problem = case.problem(
            self.dtype, self.device.type, requires_grad=requires_grad, dropout_p=dropout_p
        )
        reason = self.kernel.unsupported(problem)
        if reason is not None:
            given = isinstance(reason, str) and bool(reason.strip())
            assert given, f"unsupported gave {reason!r}, which is not a reason"
            raise Refused(reason)


class _MaskWatch(TorchFunctionMode):
    """Notes every tensor that is one Sq x Sk matrix for all heads: a mask, whatever its dtype.

    It sees what the kernel makes through torch's functions, not what happens inside one of them.
    """

    def __init__(self, case: Case) -> None:
        super().__init__()
        self._size = (case.num_queries, case.num_keys)
        self.seen: list[str] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        rows, columns = self._size
        if (
            isinstance(result, Tensor)
            and tuple(result.shape[-2:]) == self._size
            and result.numel() == rows * columns
        ):
            self.seen.append(f"{result.dtype} {tuple(result.shape)}")
        return result


def _reference(case: Case, tensors: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """On CPU, as float64 is not to be had on every device."""
    query, key, value = (tensor.cpu() for tensor in tensors)
    added = case.added(tensors[0].dtype, torch.device("cpu"))
    return reference_attention(query, key, value, band=case.band, scale=case.scale, added=added)


def _bound(dtype: torch.dtype) -> float:
    """The largest error relative to the largest value, for sums over a few hundred elements.

    Half precisions round inputs of the second product and the result: a few units in the last
    place of the largest value.
    """
    if dtype in (torch.float64, torch.float32):
        return {torch.float64: 1e-10, torch.float32: 1e-5}[dtype]
    return 4 * torch.finfo(dtype).eps
