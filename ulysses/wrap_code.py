"""What a class's code calls: how a module that nobody registered is recognised as attending."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any

_DEPTH = 4  # calls followed, into the class's own methods and into plain functions


def names_in(kind: type, start: str = "forward", depth: int = _DEPTH) -> frozenset[str]:
    """Global and attribute names in a method, and in the methods and functions that it calls.

    Neither methods nor functions of torch are followed.
    """
    return _names_in(kind, start, depth)


@functools.lru_cache(maxsize=4096)
def _names_in(kind: Any, start: str, depth: int) -> frozenset[str]:
    return _reached(_method(kind, start), kind, depth)


def calls_in(function: Any) -> frozenset[str]:
    """The same of one callable, a function or an object that is called."""
    plain = _plain(function)
    return _reached(plain, None, _DEPTH) if plain else names_in(type(function), "__call__")


def _method(kind: type, name: str) -> FunctionType | None:
    return _plain(inspect.getattr_static(kind, name, None))


def _plain(attribute: Any) -> FunctionType | None:
    """The Python function under decorators and descriptors, unless it is torch's."""
    for _ in range(10):
        if isinstance(attribute, (staticmethod, classmethod)):
            attribute = attribute.__func__
        elif isinstance(attribute, property):
            attribute = attribute.fget
        elif hasattr(attribute, "__wrapped__"):
            attribute = attribute.__wrapped__
        else:
            break
    if not isinstance(attribute, FunctionType) or attribute.__module__.split(".")[0] == "torch":
        return None
    return attribute


def _reached(function: FunctionType | None, kind: type | None, depth: int) -> frozenset[str]:
    if function is None:
        return frozenset()
    names = {name for code in _codes(function.__code__) for name in code.co_names}
    if depth:
        for name in tuple(names):
            called = _plain(function.__globals__.get(name))
            method = None if kind is None else _method(kind, name)
            for callee, of in ((called, None), (method, kind)):
                if callee is not None and callee is not function:
                    names |= _reached(callee, of, depth - 1)
    return frozenset(names)


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)
