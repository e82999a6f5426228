"""Breaking the sources on purpose, in a process that has loaded them."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Mutation:
    """`old` is replaced by `new` wherever it stands in a module's source."""

    module: str
    old: str
    new: str

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Run the mutated text of each function, also where it has been imported by name."""
        module = importlib.import_module(self.module)
        source = Path(inspect.getfile(module)).read_text()
        if self.old not in source:
            raise ValueError(f"{self.module} has no text {self.old!r}: there is nothing to break")
        mutant = types.ModuleType(module.__name__)
        exec(compile(source.replace(self.old, self.new), module.__name__, "exec"), vars(mutant))
        ours, theirs = _functions(vars(module), module), _functions(vars(mutant), module)
        assert ours.keys() == theirs.keys()
        changed = {n: f for n, f in ours.items() if not _same(f.__code__, theirs[n].__code__)}
        if not changed:
            raise ValueError(f"{self.module}: {self.old!r} stands in no function")
        codes = {name: function.__code__ for name, function in changed.items()}
        for name, function in changed.items():
            function.__code__ = theirs[name].__code__
        try:
            yield
        finally:
            for name, function in changed.items():
                function.__code__ = codes[name]
                vars(function).clear()


def _functions(
    names: dict[str, object], module: types.ModuleType, prefix: str = ""
) -> dict[str, types.FunctionType]:
    """Functions, methods and properties that a module itself defines, by qualified name."""
    found = {}
    for name, value in names.items():
        if isinstance(value, property):
            value = value.fget
        if isinstance(value, staticmethod):
            value = value.__func__
        if inspect.isclass(value) and value.__module__ == module.__name__:
            found |= _functions(dict(vars(value)), module, f"{prefix}{name}.")
        elif isinstance(value, types.FunctionType) and value.__module__ == module.__name__:
            found[prefix + name] = inspect.unwrap(value)
    return found


def _same(one: types.CodeType, other: types.CodeType) -> bool:
    """Apart from the file's name and lines."""
    return one.replace(co_filename="") == other.replace(co_filename="")


def broken(
    rank: int, num_ranks: int, mutation: Mutation, function: Callable[..., object], *args: object
) -> object:
    """What `function(rank, num_ranks, *args)` gives on this rank of a pool while that is broken."""
    with mutation.applied():
        return function(rank, num_ranks, *args)
