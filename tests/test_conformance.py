"""The conformance kit: it passes a right kernel, and sees each fault that is planted in one."""

import dataclasses
import re

import pytest
import torch
from torch import Tensor

from ulysses.backends import Band, Dropout, Problem
from ulysses.backends.sdpa import SdpaAttention
from ulysses.conformance import CASES
from ulysses.conformance_checks import Refused, Subject
from ulysses.conformance_dropout import check_dropout
from ulysses.testing import ConformanceError, check_backend

_CASES = {case.name: case for case in CASES}


@pytest.fixture(autouse=True)
def _one_thread():
    """Small tensors: threads only get into each other's way."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_sdpa_passes_the_kit():
    report = check_backend("sdpa")
    assert len(report.passed) > 4 * 2 * len(CASES)
    assert not report.refused
    assert str(report).startswith(f"backend 'sdpa' on cpu: {len(report.passed)} passed, 0 refused")


class Faulty(SdpaAttention):
    """A right kernel, for the faults below to override."""

    def unsupported(self, problem: Problem) -> str | None:
        del problem
        return None


class KeepsHeadCount(Faulty):
    """The fault this project exists for: the first call's head count is used for all."""

    heads = 0

    def __call__(self, query, key, value, **options):
        self.heads = self.heads or query.shape[2]
        tensors = (tensor[:, :, : self.heads] for tensor in (query, key, value))
        return super().__call__(*tensors, **options)


class IgnoresScale(Faulty):
    def __call__(self, query, key, value, *, scale, **options):
        return super().__call__(query, key, value, scale=query.shape[3] ** -0.5, **options)


class IgnoresBand(Faulty):
    def __call__(self, query, key, value, *, band, **options):
        return super().__call__(query, key, value, band=Band(), **options)


class CausalFromTheWrongCorner(Faulty):
    def __call__(self, query, key, value, *, band, **options):
        corner = key.shape[1] - query.shape[1]
        band = Band(None, 0) if band == Band(None, corner) else band
        return super().__call__(query, key, value, band=band, **options)


class TilesSharedHeads(Faulty):
    def __call__(self, query, key, value, **options):
        group = query.shape[2] // key.shape[2]
        key, value = (tensor.repeat(1, 1, group, 1) for tensor in (key, value))
        return super().__call__(query, key, value, **options)


class AveragesWhereNothingIsSeen(Faulty):
    def __call__(self, query, key, value, *, band, **options):
        out = super().__call__(query, key, value, band=band, **options)
        empty = ~band.mask(query.shape[1], key.shape[1], query.device).any(1)
        return out + empty.view(1, -1, 1, 1)


class ReadsMemoryInOrder(Faulty):
    def __call__(self, query, key, value, **options):
        query = query.as_strided(query.shape, torch.empty(query.shape).stride())
        return super().__call__(query, key, value, **options)


class WritesItsInput(Faulty):
    def __call__(self, query, key, value, *, scale, **options):
        return super().__call__(query.detach().mul_(scale), key, value, scale=1.0, **options)


class LosesTheGradientOfValue(Faulty):
    def __call__(self, query, key, value, **options):
        return super().__call__(query, key, value.detach(), **options)


class _Halved(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor: Tensor) -> Tensor:
        return tensor.clone()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return gradient / 2


class AveragesSharedGradients(Faulty):
    def __call__(self, query, key, value, **options):
        return super().__call__(query, _Halved.apply(key), value, **options)


class RoundsToHalf(Faulty):
    def __call__(self, query, key, value, **options):
        return super().__call__(query, key, value, **options).bfloat16().to(query.dtype)


class ReturnsAnotherDtype(Faulty):
    def __call__(self, query, key, value, **options):
        return super().__call__(query, key, value, **options).double()


class RunsWhatItRefuses(Faulty):
    def unsupported(self, problem: Problem) -> str | None:
        return "no"


class RefusesWithoutAReason(Faulty):
    def unsupported(self, problem: Problem) -> str | None:
        return ""


class HidesItsMask(Faulty):
    def materialises(self, problem: Problem) -> bool:
        return False


class DropsTheMask(Faulty):
    def __call__(self, query, key, value, *, mask=None, **options):
        return super().__call__(query, key, value, **options)


class ReadsTrueAsHidden(Faulty):
    def __call__(self, query, key, value, *, mask=None, **options):
        return super().__call__(query, key, value, mask=None if mask is None else ~mask, **options)


class ReadsTheFirstHeadsMask(Faulty):
    def __call__(self, query, key, value, *, mask=None, **options):
        mask = None if mask is None else mask[:, :1]
        return super().__call__(query, key, value, mask=mask, **options)


class CountsAlibiFromItsOwnCorner(Faulty):
    """Seen only beside a sink: a row's softmax does not change when all its scores move."""

    def __call__(self, query, key, value, *, alibi=None, **options):
        alibi = alibi and dataclasses.replace(alibi, distance=0)
        return super().__call__(query, key, value, alibi=alibi, **options)


class LosesTheGradientOfSinks(Faulty):
    def __call__(self, query, key, value, *, sinks=None, **options):
        sinks = None if sinks is None else sinks.detach()
        return super().__call__(query, key, value, sinks=sinks, **options)


class IgnoresDropout(Faulty):
    def __call__(self, query, key, value, *, dropout=None, **options):
        return super().__call__(query, key, value, **options)


class RepeatsDropoutOnEveryTile(Faulty):
    def __call__(self, query, key, value, *, dropout=None, **options):
        dropout = dropout and Dropout(p=dropout.p, seed=dropout.seed)
        return super().__call__(query, key, value, dropout=dropout, **options)


class DoesNotScaleUpWhatSurvives(Faulty):
    def __call__(self, query, key, value, *, dropout=None, **options):
        out = super().__call__(query, key, value, dropout=dropout, **options)
        return out * (1 - dropout.p) if dropout else out


class DrawsAnotherPatternInBackward(Faulty):
    def __call__(self, query, key, value, *, dropout=None, **options):
        if dropout and value.requires_grad:
            dropout = dataclasses.replace(dropout, seed=dropout.seed + 1)
        return super().__call__(query, key, value, dropout=dropout, **options)


class MovesTheRandomState(Faulty):
    def __call__(self, query, key, value, **options):
        torch.rand(1)
        return super().__call__(query, key, value, **options)


class LogSumExpInBaseTwo(Faulty):
    def attend_with_lse(self, query, key, value, **options):
        out = self(query, key, value, **options)
        return out, torch.zeros(query.shape[:3])


def _forward(name):
    return lambda subject: subject.check_forward(_CASES[name])


def _backward(name):
    return lambda subject: subject.check_backward(_CASES[name])


_FAULTS = [
    (KeepsHeadCount, Subject.check_head_counts_in_turn, "output has shape (1, 7, 2, 16)"),
    (IgnoresScale, _forward("scale of one"), "output is off by"),
    (IgnoresBand, _forward("causal"), "output is off by"),
    (CausalFromTheWrongCorner, _forward("causal from the bottom right, more keys"), "off by"),
    (TilesSharedHeads, _forward("grouped heads"), "output is off by"),
    (AveragesWhereNothingIsSeen, _forward("no row sees anything"), "off by 1"),
    (ReadsMemoryInOrder, _forward("memory SBHD"), "output is off by"),
    (WritesItsInput, _forward("plain"), "query was modified"),
    (LosesTheGradientOfValue, _backward("plain"), "gradient of value is missing"),
    (AveragesSharedGradients, _backward("plain"), "gradient of key is off by"),
    (RoundsToHalf, _forward("plain"), "output is off by"),
    (ReturnsAnotherDtype, _forward("plain"), "output is torch.float64"),
    (RunsWhatItRefuses, _forward("plain"), "it ran what `unsupported` had refused with 'no'"),
    (RefusesWithoutAReason, _forward("plain"), "unsupported gave '', which is not a reason"),
    (HidesItsMask, Subject.check_mask_claims, "a mask torch.bool"),
    (DropsTheMask, _forward("key padding"), "output is off by"),
    (ReadsTrueAsHidden, _forward("bool mask"), "output is off by"),
    (ReadsTheFirstHeadsMask, _backward("float mask of keys of each head"), "output is off by"),
    (CountsAlibiFromItsOwnCorner, _forward("all of it"), "output is off by"),
    (LosesTheGradientOfSinks, _backward("sinks"), "gradient of sinks is missing"),
    (IgnoresDropout, check_dropout, "weights after dropout is off by"),
    (RepeatsDropoutOnEveryTile, check_dropout, "another first head gave the same pattern"),
    (DoesNotScaleUpWhatSurvives, check_dropout, "weights after dropout is off by"),
    (DrawsAnotherPatternInBackward, check_dropout, "gradient of value under dropout is off by"),
    (MovesTheRandomState, check_dropout, "the device's random state was moved"),
    (LogSumExpInBaseTwo, Subject.check_log_sum_exp, "log-sum-exp of"),
]


def _name(value) -> str:
    return value if isinstance(value, str) else value.__qualname__.replace(".<locals>.<lambda>", "")


@pytest.mark.parametrize(("fault", "check", "text"), _FAULTS, ids=_name)
def test_the_kit_sees_a_fault(fault, check, text):
    right = Subject(Faulty(), torch.device("cpu"), torch.float32)
    if fault is not LogSumExpInBaseTwo:
        check(right)
    subject = dataclasses.replace(right, kernel=fault())
    with pytest.raises(AssertionError, match=re.escape(text)):
        check(subject)


def test_a_fault_is_reported_with_every_check_that_failed():
    with pytest.raises(ConformanceError, match="failed   float32, grouped heads, forward") as error:
        check_backend(TilesSharedHeads(), dtypes=(torch.float32,))
    assert "failed   float32, one key/value head" not in str(error.value)


def test_a_kernel_that_crashes_fails_the_check_and_the_next_one_runs():
    class Crashes(Faulty):
        def __call__(self, query, key, value, **options):
            raise ZeroDivisionError("in the kernel")

    with pytest.raises(ConformanceError, match="ZeroDivisionError: in the kernel") as error:
        check_backend(Crashes(), dtypes=(torch.float32,))
    assert str(error.value).count("in the kernel") > len(CASES)


def test_a_kernel_that_refuses_everything_does_not_pass():
    class RefusesAll(Faulty):
        def unsupported(self, problem: Problem) -> str | None:
            return "not today"

        def __call__(self, query, key, value, **options):
            raise ValueError("not today")

    with pytest.raises(ConformanceError, match="every check was refused: not today"):
        check_backend(RefusesAll())
    subject = Subject(RefusesAll(), torch.device("cpu"), torch.float32)
    with pytest.raises(Refused, match="not today"):
        subject.check_forward(_CASES["plain"])
