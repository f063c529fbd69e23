"""Reading and writing documents: what is refused, and that equal records are equal bytes."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import jsonschema
import pytest
from annotated_types import Ge
from pydantic import ConfigDict

from planner.layout import Layout
from planner.topology import Topology
from profiler.device import Device
from profiler.documents import (
    MAX_BYTES,
    MAX_PROBLEMS,
    STRICT,
    digest,
    dump,
    load,
    parse,
    read_data,
    schema,
    to_data,
    write_atomically,
)
from profiler.errors import InvalidInput
from profiler.layer_graph import LayerGraph
from tests.planner.instances import make_instance


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    size: Annotated[int, Ge(1)]
    share: float = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    meshwright: Literal["Whole"] = "Whole"
    version: Literal[1] = 1
    name: str
    parts: tuple[Part, ...] = ()
    table: dict[str, int] = field(default_factory=dict)


DATA: dict[str, Any] = {"name": "a", "parts": [{"size": 2}, {"size": 3, "share": 0.25}]}
RECORD = Whole(name="a", parts=(Part(size=2), Part(size=3, share=0.25)))


def written(tmp_path: Path, text: str, name: str = "a.json") -> Path:
    path = tmp_path / name
    path.write_text(text)
    return path


def test_data_becomes_a_record_and_data_again() -> None:
    assert parse(Whole, DATA, "here") == RECORD
    assert to_data(RECORD) == {"meshwright": "Whole", "version": 1} | DATA
    assert parse(Whole, json.loads(dump(RECORD)), "here") == RECORD


@pytest.mark.parametrize(("data", "message"), [
    ({**DATA, "colour": "red"}, "here: colour: unknown key"),
    ({**DATA, "parts": [{"size": 0}]}, r"here: parts\.0\.size: .*greater than or equal to 1"),
    ({**DATA, "parts": [{"size": 1, "share": float("nan")}]}, r"parts\.0\.share: .*finite"),
    ({"parts": []}, "here: name: Field required"),
    ({**DATA, "version": 2}, "here: version: "),
    ([], "here: "), (None, "here: "), ("text", "here: "),
])
def test_refused_data(data: object, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        parse(Whole, data, "here")


def test_every_problem_at_once_up_to_a_number() -> None:
    with pytest.raises(InvalidInput) as caught:
        parse(Whole, {"parts": [{"size": 0}, {"share": 1}]}, "here")
    assert len(caught.value.problems) == 3
    with pytest.raises(InvalidInput) as caught:
        parse(Whole, {"name": "a", "parts": [{"size": 0}] * 50}, "here")
    assert len(caught.value.problems) == MAX_PROBLEMS + 1
    assert caught.value.problems[-1] == f"here: and {50 - MAX_PROBLEMS} more"


@pytest.mark.parametrize(("name", "text", "message"), [
    ("a.json", "{", "malformed JSON"),
    ("a.json", '{"name": NaN}', "malformed JSON"),
    ("a.json", '{"name": "a", "name": "b"}', "key 'name' is given twice"),
    ("a.json", "[" * 100_000, "malformed JSON"),
    ("a.yaml", "a: [1", "malformed YAML"),
    ("a.yaml", "a: 1\na: 2", "key 'a' is given twice"),
    ("a.yml", "x:\n  a: 1\n  b: 2\n  a: 3", "key 'a' is given twice"),
    ("a.yaml", "a: &x [1]\nb: *x", "YAML aliases are not accepted"),
    ("a.yaml", "[" * 70 + "]" * 70, "nested deeper than 64 levels"),
    ("a.yaml", "!!python/object/apply:os.getcwd []", "malformed YAML"),
])
def test_refused_files(tmp_path: Path, name: str, text: str, message: str) -> None:
    path = written(tmp_path, text, name)
    with pytest.raises(InvalidInput, match=message) as caught:
        read_data(path)
    assert str(path) in str(caught.value)


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="cannot be read: No such file"):
        read_data(tmp_path / "none.json")
    with pytest.raises(InvalidInput, match="is a directory"):
        read_data(tmp_path)
    (tmp_path / "b.json").write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidInput, match="not UTF-8"):
        read_data(tmp_path / "b.json")
    with (tmp_path / "big.json").open("wb") as file:
        file.truncate(MAX_BYTES + 1)
    with pytest.raises(InvalidInput, match="a document has at most"):
        read_data(tmp_path / "big.json")


def test_yaml_and_json_say_the_same(tmp_path: Path) -> None:
    yaml = "name: a\nparts:\n  - size: 2\n  - {size: 3, share: 0.25}\n"
    assert load(Whole, written(tmp_path, yaml, "a.yaml")) == RECORD
    assert load(Whole, written(tmp_path, json.dumps(DATA))) == RECORD
    assert read_data(written(tmp_path, "", "empty.yaml")) is None


def test_equal_records_are_equal_bytes() -> None:
    one = Whole(name="a", table={"x": 1, "y": 2})
    other = Whole(name="a", table={"y": 2, "x": 1})
    assert digest(one) == digest(other)
    assert digest(one) != digest(Whole(name="a", table={"x": 2, "y": 2}))
    assert digest(one).startswith("sha256:") and len(digest(one)) == 7 + 64
    assert dump(RECORD) == dump(parse(Whole, DATA, "here"))


def test_defaults_are_left_out_and_the_kind_of_document_is_not() -> None:
    assert to_data(Whole(name="a")) == {"meshwright": "Whole", "version": 1, "name": "a"}
    assert "share" not in to_data(RECORD)["parts"][0]


@pytest.mark.parametrize("record", [Whole, Device, Topology, LayerGraph, Layout])
def test_schemas_are_valid_json_schemas(record: type[Any]) -> None:
    made = schema(record)
    jsonschema.Draft202012Validator.check_schema(made)
    assert made["additionalProperties"] is False


@pytest.mark.parametrize("seed", range(12))
def test_generated_documents_round_trip_and_meet_their_schemas(seed: int) -> None:
    instance = make_instance(seed)
    for record in (instance.graph, instance.topology):
        data = json.loads(dump(record))
        assert parse(type(record), data, "here") == record
        jsonschema.validate(data, schema(type(record)))


def test_files_are_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch
                                               ) -> None:
    path = tmp_path / "a.json"
    write_atomically(path, "old")
    assert path.read_text() == "old"
    mode = path.stat().st_mode & 0o777
    umask = os.umask(0)
    os.umask(umask)
    assert mode == 0o666 & ~umask

    def fail(_: int) -> None:
        raise OSError(28, "No space left on device")
    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(InvalidInput, match=r"cannot be written: No space left"):
        write_atomically(path, "new")
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


def test_places_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="is a directory"):
        write_atomically(tmp_path, "text")
    with pytest.raises(InvalidInput, match="cannot be written: No such file"):
        write_atomically(tmp_path / "none" / "a.json", "text")
