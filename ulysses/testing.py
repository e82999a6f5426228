"""The conformance kit for local kernels, ours or a user's.

    from ulysses.testing import check_backend
    print(check_backend(MyKernel(), device="cuda"))

Every case is compared with an explicit float64 reference: the output, and every gradient. A kernel
may refuse a case through `unsupported`, and must then refuse the call too; what it accepts has to
be right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from ulysses.backends.base import LocalAttention
from ulysses.backends.registry import get_backend
from ulysses.conformance import CASES
from ulysses.conformance_checks import Refused, Subject
from ulysses.conformance_dropout import check_dropout
from ulysses.conformance_pieces import check_pieces

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class ConformanceError(AssertionError):
    """A kernel failed the kit; the text lists each check and what was wrong."""


@dataclass(slots=True)
class Report:
    """What was checked: names that passed, and (name, reason) of refusals and failures."""

    backend: str
    device: str
    passed: list[str] = field(default_factory=list)
    refused: list[tuple[str, str]] = field(default_factory=list)
    failed: list[tuple[str, str]] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [
            f"backend {self.backend!r} on {self.device}: {len(self.passed)} passed, "
            f"{len(self.refused)} refused, {len(self.failed)} failed"
        ]
        lines += [f"  failed   {name}: {why}" for name, why in self.failed]
        reasons: dict[str, list[str]] = {}
        for name, why in self.refused:
            reasons.setdefault(why, []).append(name)
        lines += [
            f"  refused  {len(names)} ({names[0]}, ...): {why}" for why, names in reasons.items()
        ]
        return "\n".join(lines)


def check_backend(
    backend: str | LocalAttention,
    device: str | torch.device = "cpu",
    dtypes: Sequence[torch.dtype] = _DTYPES,
) -> Report:
    """Run a kernel through every case in every dtype, and report.

    Raises:
        ConformanceError: some check failed, or the kernel refused every one.
    """
    device = torch.device(device)
    kernel = get_backend(backend, device.type)
    report = Report(kernel.name, str(device))
    for dtype in dtypes:
        subject = Subject(kernel, device, dtype)
        for name, check in _checks(subject):
            _run(report, f"{str(dtype).removeprefix('torch.')}, {name}", check)
    if not report.passed and not report.failed:
        report.failed.append(("all", f"every check was refused: {report.refused[0][1]}"))
    if report.failed:
        raise ConformanceError(str(report))
    return report


def _checks(subject: Subject) -> Iterator[tuple[str, Callable[[], None]]]:
    """Every check by name."""
    for case in CASES:
        yield f"{case.name}, forward", partial(subject.check_forward, case)
        yield f"{case.name}, backward", partial(subject.check_backward, case)
    yield "gradients of some inputs", subject.check_partial_gradients
    yield "upstream gradient of stride 0", subject.check_expanded_upstream
    yield "head counts in turn", subject.check_head_counts_in_turn
    yield "no mask where none is announced", subject.check_mask_claims
    yield "log-sum-exp", subject.check_log_sum_exp
    yield "dropout", partial(check_dropout, subject)
    if hasattr(subject.kernel, "attend_pieces"):
        yield "rows in pieces", partial(check_pieces, subject)


def _run(report: Report, name: str, check: Callable[[], None]) -> None:
    try:
        check()
    except Refused as refusal:
        report.refused.append((name, str(refusal)))
    except Exception as error:  # whatever a kernel raises is a finding, and the next check goes on
        kind = "" if isinstance(error, AssertionError) else f"{type(error).__name__}: "
        report.failed.append((name, f"{kind}{error}"))
    else:
        report.passed.append(name)
