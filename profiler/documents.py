"""Reading and writing the JSON and YAML documents that pass between the packages.

A record is a frozen dataclass with `__pydantic_config__ = STRICT`; `parse` turns untrusted text
into one, `dump` turns it back into canonical bytes (sorted keys, no NaN), so that equal records are
equal bytes. Nothing here evaluates or unpickles anything from outside. pydantic is only imported
where `profiler/records.py` is not enough: to validate whole documents of a user, and to say what is
wrong.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from profiler.errors import InvalidInput
from profiler.records import build, plain

if TYPE_CHECKING:
    import yaml
    from pydantic import ConfigDict, TypeAdapter, ValidationError

__all__ = ["MAX_BYTES", "STRICT", "adapter", "digest", "dump", "load", "load_shipped", "make",
           "parse", "read_data", "read_shipped", "schema", "to_data", "write_atomically"]

STRICT: ConfigDict = {"extra": "forbid", "allow_inf_nan": False, "ser_json_inf_nan": "null"}

MAX_BYTES = 32 * 2**20
"""Largest document read. The largest honest one (a profile of a 126-layer model) is below 2 MiB."""

MAX_DEPTH = 64
"""Deepest nesting read from YAML, whose parser takes minutes over a few thousand levels, and from
JSON without pydantic_core's own limit. The deepest honest document has about ten."""

MAX_PROBLEMS = 12
"""How many violations one message lists before it says how many more there are."""

Record = TypeVar("Record")


def adapter(record: Any) -> TypeAdapter[Any]:
    """The pydantic adapter that validates data into `record`."""
    return _adapter(record)


@functools.cache
def _adapter(record: Any) -> TypeAdapter[Any]:
    from pydantic import TypeAdapter

    return TypeAdapter(record)


def schema(record: type[Any]) -> dict[str, Any]:
    """The JSON Schema of a record."""
    return adapter(record).json_schema()


def read_data(path: str | Path) -> Any:
    """Parse a JSON or YAML file (by its suffix) into plain data.

    Raises:
        InvalidInput: unreadable, larger than `MAX_BYTES`, malformed, or YAML with aliases.
    """
    path = Path(path)
    try:
        size = path.stat().st_size
        if path.is_dir():
            raise InvalidInput(f"{path}: is a directory, a file is needed")
        if size > MAX_BYTES:
            raise InvalidInput(f"{path}: {size:,} bytes; a document has at most {MAX_BYTES:,}")
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise InvalidInput(f"{path}: cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise InvalidInput(f"{path}: is not UTF-8 text: {error}") from None
    if path.suffix in {".yaml", ".yml"}:
        return _parse_yaml(text, str(path))
    return _parse_json(text, str(path))


def _parse_json(text: str, where: str) -> Any:
    try:
        if text.count("[") + text.count("{") > MAX_DEPTH:
            from pydantic_core import from_json

            from_json(text, allow_inf_nan=False)  # bounds the nesting, which json does not
        return json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse)
    except ValueError as error:
        raise InvalidInput(f"{where}: malformed JSON: {error}") from None


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no number of JSON")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON; a key given twice would silently lose its first value."""
    data = dict(pairs)
    if len(data) < len(pairs):
        raise ValueError(f"key {_repeated([key for key, _ in pairs])!r} is given twice")
    return data


def _repeated(keys: list[str]) -> str | None:
    """The first key that occurs a second time."""
    seen: set[str] = set()
    for key in keys:
        if key in seen:
            return key
        seen.add(key)
    return None


def _parse_yaml(text: str, where: str) -> Any:
    import yaml

    try:
        _check_tokens(text, where)
        loader = yaml.SafeLoader(text)
        try:
            node = loader.get_single_node()
            if node is None:
                return None
            _check_keys(node)
            return loader.construct_document(node)
        finally:
            loader.dispose()
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        message = " ".join(str(error).split())
        raise InvalidInput(f"{where}: malformed YAML: {message}") from None


def _check_tokens(text: str, where: str) -> None:
    """Refuse aliases and deep nesting before anything is built."""
    import yaml

    opening = (yaml.BlockMappingStartToken, yaml.BlockSequenceStartToken,
               yaml.FlowMappingStartToken, yaml.FlowSequenceStartToken)
    closing = (yaml.BlockEndToken, yaml.FlowMappingEndToken, yaml.FlowSequenceEndToken)
    depth = 0
    for token in yaml.scan(text, Loader=yaml.SafeLoader):
        if isinstance(token, yaml.AliasToken):
            raise InvalidInput(f"{where}: YAML aliases are not accepted; write it out")
        depth += isinstance(token, opening) - isinstance(token, closing)
        if depth > MAX_DEPTH:
            raise InvalidInput(f"{where}: nested deeper than {MAX_DEPTH} levels")


def _check_keys(node: yaml.Node) -> None:
    """Refuse a mapping that gives a key twice, anywhere below `node`."""
    if isinstance(node.value, str):
        return
    pairs = [item for item in node.value if isinstance(item, tuple)]
    repeated = _repeated([str(key.value) for key, _ in pairs])
    if repeated is not None:
        raise ValueError(f"key {repeated!r} is given twice")
    for item in node.value:
        _check_keys(item[1] if isinstance(item, tuple) else item)


def parse(record: type[Record], data: Any, where: str) -> Record:
    """Validate plain data into a record; every violation is listed in the error."""
    from pydantic import ValidationError

    try:
        parsed: Record = adapter(record).validate_python(data)
    except ValidationError as error:
        raise InvalidInput(_explain(error, where)) from None
    except RecursionError:
        raise InvalidInput(f"{where}: nested too deeply") from None
    return parsed


def _explain(error: ValidationError, where: str) -> list[str]:
    problems = []
    for item in error.errors(include_url=False):
        place = ".".join(str(part) for part in item["loc"])
        value = item.get("input")
        shown = "" if isinstance(value, (dict, list, tuple)) else f" (got {str(value)[:60]!r})"
        if item["type"] in {"extra_forbidden", "unexpected_keyword_argument"}:
            text = "unknown key"
            shown = ""
        else:
            text = item["msg"].removeprefix("Value error, ")
        problems.append(f"{where}: {place + ': ' if place else ''}{text}{shown}")
    if len(problems) > MAX_PROBLEMS:
        rest = len(problems) - MAX_PROBLEMS
        problems = [*problems[:MAX_PROBLEMS], f"{where}: and {rest} more"]
    return problems


def load(record: type[Record], path: str | Path) -> Record:
    """Read a file and validate it into a record."""
    return parse(record, read_data(path), str(path))


def make(record: type[Record], data: Any, where: str) -> Record:
    """As `parse`, but pydantic is only asked about what is not exactly of the record's types.

    For what ships with the packages, and for the few words that a user gives with them.
    """
    try:
        return build(record, data)
    except ValueError:
        return parse(record, data, where)


def read_shipped(path: Path) -> Any:
    """The plain data of a JSON file of the packages."""
    return json.loads(path.read_text(encoding="utf-8"))


def load_shipped(record: type[Record], path: Path) -> Record:
    """The record of a JSON file of the packages."""
    return make(record, read_shipped(path), str(path))


def to_data(record: Any) -> Any:
    """The plain JSON-able form of a record, without the fields that hold their defaults."""
    data = plain(record)
    if hasattr(record, "meshwright"):  # a document says what it is, default or not
        data = {"meshwright": record.meshwright, "version": record.version} | data
    return data


def dump(record: Any, *, indent: int | None = 1) -> str:
    """Canonical JSON text of a record: fields in their order, those at their default left out."""
    return json.dumps(to_data(record), indent=indent, allow_nan=False) + "\n"


def digest(record: Any) -> str:
    """SHA-256 of the canonical form, as `sha256:<hex>`."""
    data = json.dumps(to_data(record), sort_keys=True, separators=(",", ":"), allow_nan=False)
    return "sha256:" + hashlib.sha256(data.encode()).hexdigest()


def write_atomically(path: str | Path, content: str | bytes) -> None:
    """Write a file (text as UTF-8) so that a reader sees the old one or the whole new one.

    Raises:
        InvalidInput: the place cannot be written.
    """
    import tempfile  # here: reading needs none of what it imports

    path = Path(path)
    try:
        if path.is_dir():
            raise IsADirectoryError(21, "is a directory")
        if path.exists() and not os.access(path, os.W_OK):
            raise PermissionError(13, "Permission denied")
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content.encode() if isinstance(content, str) else content)
                file.flush()
                os.fsync(file.fileno())
            umask = os.umask(0)
            os.umask(umask)
            Path(temporary).chmod(0o666 & ~umask)
            Path(temporary).replace(path)
        except BaseException:
            Path(temporary).unlink()
            raise
    except OSError as error:
        raise InvalidInput(f"{path}: cannot be written: {error.strerror or error}") from None
