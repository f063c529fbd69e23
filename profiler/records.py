"""Records from plain data and plain data from records, by the types of their fields alone.

pydantic does the same, says what is wrong with data that it refuses and gives the JSON Schemas, but
takes a third of a second to start. What ships with the packages needs neither: `build` takes
data that is exactly of the types of a record, within their limits, and refuses everything else as
`Unlike`, upon which the caller lets pydantic decide (`documents.make`). What both accept they read
and write alike.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import MISSING, Field, fields, is_dataclass
from math import isfinite
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from profiler.limits import Limit

__all__ = ["Unlike", "build", "plain"]

Record = TypeVar("Record")
Convert = Callable[[Any], Any]


class Unlike(ValueError):
    """Data that is not exactly of the types of a record."""


def build(record: type[Record], data: Any) -> Record:
    """The record of plain data.

    Raises:
        ValueError: the data is not exactly of the record's types (`Unlike`), or the record itself
            refuses it.
    """
    kind: Any = record
    built: Record = _reader(kind)(data)
    return built


def plain(record: Any) -> Any:
    """The plain data of a record, without the fields that hold their defaults."""
    kind: Any = type(record)
    return _writer(kind)(record)


@functools.cache
def _types(record: Any) -> tuple[tuple[Field[Any], Any], ...]:
    """(field, its type) of every field of a record."""
    names = vars(sys.modules[record.__module__])
    return tuple((field, eval(field.type, names) if isinstance(field.type, str) else field.type)
                 for field in fields(record))


@functools.cache
def _reader(hint: Any) -> Convert:
    """What turns data into a value of the type `hint`."""
    origin, args = get_origin(hint), get_args(hint)
    if is_dataclass(hint):
        return _record_reader(hint)
    if origin is Annotated:
        return _limited(_reader(args[0]), args[1:])
    if origin is Literal:
        return lambda data: data if data in args and type(data) in (str, int) else _refuse(data)
    if origin in (Union, UnionType):
        inner = _reader(_of_optional(args))
        return lambda data: None if data is None else inner(data)
    if origin is tuple:
        return _tuple_reader(args)
    if origin is dict:
        key, value = map(_reader, args)
        return lambda data: ({key(k): value(v) for k, v in data.items()} if type(data) is dict
                             else _refuse(data))
    if hint is Any:
        return lambda data: data
    if hint is float:
        return _float
    if hint is str:
        return _text
    if hint in (int, bool):
        return lambda data: data if type(data) is hint else _refuse(data)
    raise TypeError(f"no record has fields of type {hint}")


def _refuse(data: Any) -> Any:
    raise Unlike(f"{str(data)[:60]!r}")


def _of_optional(args: tuple[Any, ...]) -> Any:
    """X of `X | None`."""
    inner = [arg for arg in args if arg is not NoneType]
    if len(inner) != 1 or len(args) != 2:
        raise TypeError(f"no record has fields of one of the types {args}")
    return inner[0]


def _text(data: Any) -> str:
    if type(data) is not str:
        raise Unlike(f"{str(data)[:60]!r}")
    if not data.isascii():
        data.encode()  # a ValueError where half a surrogate pair is left
    return data


def _float(data: Any) -> float:
    if type(data) not in (float, int) or not abs(data) <= sys.float_info.max:  # so is no NaN
        raise Unlike(f"{data!r}")
    return float(data)


def _tuple_reader(args: tuple[Any, ...]) -> Convert:
    if args[-1] is Ellipsis:
        item = _reader(args[0])
        return lambda data: (tuple([item(d) for d in data]) if type(data) in (list, tuple)
                             else _refuse(data))
    items = [_reader(arg) for arg in args]

    def read(data: Any) -> Any:
        if type(data) not in (list, tuple) or len(data) != len(items):
            raise Unlike(f"{str(data)[:60]!r}")
        return tuple([item(d) for item, d in zip(items, data, strict=True)])
    return read


def _record_reader(record: Any) -> Convert:
    readers = {field.name: _reader(hint) for field, hint in _types(record)}
    needed = {field.name for field in fields(record)
              if field.default is MISSING and field.default_factory is MISSING}

    def read(data: Any) -> Any:
        if type(data) is record:
            return data
        if type(data) is not dict or not needed <= data.keys() <= readers.keys():
            raise Unlike(f"{str(data)[:60]!r}")
        return record(**{name: readers[name](value) for name, value in data.items()})
    return read


def _limited(read: Convert, limits: tuple[Limit, ...]) -> Convert:
    """`read` within limits of size or length."""
    def within(data: Any) -> Any:
        value = read(data)
        if not all(limit.allows(value) for limit in limits):
            raise Unlike(f"{str(data)[:60]!r}")
        return value
    return within


@functools.cache
def _writer(hint: Any) -> Convert:
    """What turns a value of the type `hint` into data."""
    origin, args = get_origin(hint), get_args(hint)
    if is_dataclass(hint):
        return _record_writer(hint)
    if origin is Annotated:
        return _writer(args[0])
    if origin in (Union, UnionType):
        inner = _writer(_of_optional(args))
        return lambda value: None if value is None else inner(value)
    if origin is tuple:
        items = [_writer(arg) for arg in args if arg is not Ellipsis]
        if args[-1] is Ellipsis:
            return lambda value: [items[0](v) for v in value]
        return lambda value: [item(v) for item, v in zip(items, value, strict=True)]
    if origin is dict:
        write = _writer(args[1])
        return lambda value: {k: write(v) for k, v in value.items()}
    if hint is float:
        return float
    return _untyped if hint is Any else lambda value: value


def _untyped(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _untyped(v) for k, v in value.items()}
    if isinstance(value, (tuple, list)):
        return [_untyped(v) for v in value]
    return value if not isinstance(value, float) or isfinite(value) else None


def _record_writer(record: Any) -> Convert:
    parts = [(field.name, _writer(hint), _default(field)) for field, hint in _types(record)]

    def write(value: Any) -> Any:
        data = {}
        for name, convert, default in parts:
            held = getattr(value, name)
            if held != default:
                data[name] = convert(held)
        return data
    return write


def _default(field: Field[Any]) -> Any:
    """What the field holds if it is left out; MISSING, which nothing equals, if it may not be."""
    return field.default if field.default_factory is MISSING else field.default_factory()
