"""What the doctor says of a machine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Finding:
    """What is the matter, with its value, and what to do about it."""

    what: str
    mend: str


class Fault(Finding):
    """Something to mend before this machine can be trusted."""


class Advice(Finding):
    """Something that is slow, or that fails in some jobs and not in others."""
