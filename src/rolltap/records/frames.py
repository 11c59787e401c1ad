"""Rows as data frames. The types of Arrow's columns are those of the rows' fields, so empty tables have them, too."""

from __future__ import annotations

import importlib
import types
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any, Union, get_args, get_origin, get_type_hints

import msgspec
import numpy as np

from rolltap.errors import ConfigError
from rolltap.extras import install_line

if TYPE_CHECKING:
    import datasets
    import pandas
    import pyarrow


def to_pandas(kind: type, rows: Sequence[Any]) -> pandas.DataFrame:
    pandas = _needs("pandas")
    return pandas.DataFrame.from_records([_values(row) for row in rows], columns=_names(kind))


def to_arrow(kind: type, rows: Sequence[Any], *, maps: bool = True) -> pyarrow.Table:
    """The rows as a table. Without `maps` a table in a field is JSON text."""
    pa = _needs("pyarrow")
    hints = get_type_hints(kind)
    columns = {}
    for name in _names(kind):
        arrow = _arrow_type(hints[name], pa)
        if pa.types.is_map(arrow) and not maps:
            arrow = pa.string()
        columns[name] = pa.array([_plain(getattr(row, name), arrow, pa) for row in rows], type=arrow)
    return pa.table(columns)


def to_datasets(kind: type, rows: Sequence[Any]) -> datasets.Dataset:
    """The rows as a dataset, whose types have no maps."""
    return _needs("datasets").Dataset(to_arrow(kind, rows, maps=False))


def _needs(package: str) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError:
        line = install_line("export") if package == "pyarrow" else f"pip install {package}"
        raise ConfigError(f"this needs {package}: {line}") from None


def _names(kind: type) -> list[str]:
    return [field.name for field in fields(kind)]


def _values(row: Any) -> dict[str, Any]:
    """A row's fields; values that are objects themselves become plain structures."""
    values = {name: getattr(row, name) for name in _names(type(row))}
    return {
        name: value if isinstance(value, np.ndarray) else msgspec.to_builtins(value) for name, value in values.items()
    }


def _arrow_type(hint: Any, pa: Any) -> Any:
    """The column type for a field; what has no plain one is JSON text."""
    if get_origin(hint) in (Union, types.UnionType):
        (hint,) = [one for one in get_args(hint) if one is not type(None)]
    simple = {str: pa.string(), int: pa.int64(), float: pa.float64(), bool: pa.bool_()}
    if hint in simple:
        return simple[hint]
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is tuple and arguments[0] in simple:
        return pa.list_(simple[arguments[0]])
    if origin is np.ndarray:
        return pa.list_(pa.from_numpy_dtype(get_args(arguments[1])[0]))
    if isinstance(origin, type) and issubclass(origin, Mapping) and arguments[1] in simple:
        return pa.map_(pa.string(), simple[arguments[1]])
    return pa.string()


def _plain(value: Any, arrow: Any, pa: Any) -> Any:
    if value is None or isinstance(value, np.ndarray):
        return value
    if pa.types.is_map(arrow):
        return list(value.items())
    if pa.types.is_string(arrow) and not isinstance(value, str):
        return msgspec.json.encode(value).decode()
    return list(value) if isinstance(value, tuple) and not is_dataclass(value) else value
