"""What a class's code calls: how a module that nobody registered is recognised as attending."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any

from torch import nn

_DEPTH = 3  # calls followed from a module's methods into plain functions


def names_in(kind: type) -> frozenset[str]:
    """Global and attribute names in a class's own methods and the functions that they call.

    Methods that torch.nn defines don't count, nor are torch's functions followed.
    """
    return _names_in(kind)


@functools.lru_cache(maxsize=4096)
def _names_in(kind: type) -> frozenset[str]:
    found: set[str] = set()
    for base in kind.__mro__:
        if base is not nn.Module and not base.__module__.startswith("torch."):
            for attribute in vars(base).values():
                if function := _plain(attribute):
                    found |= _reached(function, _DEPTH)
    return frozenset(found)


def calls_in(function: Any, depth: int = _DEPTH) -> frozenset[str]:
    """The same of one callable, a function or an object by its class; 0 follows no call."""
    plain = _plain(function)
    return _reached(plain, depth) if plain else names_in(type(function))


def _plain(attribute: Any) -> FunctionType | None:
    """The Python function under decorators and descriptors, if there is one."""
    for _ in range(10):
        if isinstance(attribute, (staticmethod, classmethod)):
            attribute = attribute.__func__
        elif isinstance(attribute, property):
            attribute = attribute.fget
        elif hasattr(attribute, "__wrapped__"):
            attribute = attribute.__wrapped__
        else:
            break
    return attribute if isinstance(attribute, FunctionType) else None


def _reached(function: FunctionType, depth: int) -> frozenset[str]:
    """Names in a function and in those of its module's functions that it names."""
    names = {name for code in _codes(function.__code__) for name in code.co_names}
    if depth:
        for name in tuple(names):
            called = _plain(function.__globals__.get(name))
            if called and called is not function and not called.__module__.startswith("torch"):
                names |= _reached(called, depth - 1)
    return frozenset(names)


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)
