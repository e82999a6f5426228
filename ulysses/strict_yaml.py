"""Files and plain data into dataclasses, where nothing unknown, double or missing passes."""

import difflib
from collections.abc import Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, TypeVar

import yaml

_Record = TypeVar("_Record")


def read(path: str | Path) -> Any:
    """The plain data of a YAML file, None if it is empty.

    Raises FileNotFoundError, or ValueError if it isn't YAML or gives a key twice.
    """
    with Path(path).open(encoding="utf-8") as stream:
        try:
            return yaml.load(stream, Loader=_Loader)
        except yaml.YAMLError as error:
            raise ValueError(f"not readable as YAML: {error}") from error


def build(cls: type[_Record], data: object, where: str) -> _Record:
    """The dataclass `cls` from a mapping of its field names; lists become tuples.

    Raises as `known` does, and ValueError for a missing field.
    """
    given = known(cls, data, where)
    for item in fields(cls):  # type: ignore[arg-type]  # every caller passes a dataclass
        required = item.default is MISSING and item.default_factory is MISSING
        if required and item.name not in given:
            raise ValueError(f"{where}.{item.name} is missing: every {where} section states it")
    return cls(**{key: tuple(v) if isinstance(v, list) else v for key, v in given.items()})


def known(cls: type[Any], data: object, where: str) -> dict[str, Any]:
    """`data` as a mapping of the dataclass's field names, without nulls: null means not given.

    Raises TypeError if it is no mapping, ValueError for an unknown key, naming the nearest known.
    """
    names = [item.name for item in fields(cls)]
    if not isinstance(data, Mapping):
        raise TypeError(f"{where}={data!r}: give a mapping with keys out of {', '.join(names)}")
    for key in data:
        if key not in names:
            nearest = difflib.get_close_matches(str(key), names, n=1, cutoff=0.0)[0]
            raise ValueError(
                f"unknown key {key!r} in {where}: the nearest known one is {nearest!r}; "
                f"known are {', '.join(names)}"
            )
    return {key: value for key, value in data.items() if value is not None}


class _Loader(yaml.SafeLoader):
    """Safe YAML in which a key given twice is an error; PyYAML would keep the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            text = str(key.value)
            if text in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {text!r} is given twice", key.start_mark
                )
            seen.add(text)
        return super().construct_mapping(node, deep)
