"""Records read and written without pydantic: exactly what pydantic reads and writes."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from planner import search, topology_files
from planner.capabilities import Capabilities, load_capabilities
from planner.layout import Layout
from planner.request import Request
from planner.stacks import FITTED, FittedConstants, Stack, load_stack, stack_names
from planner.topology import Topology
from profiler.device import Device, device_names, load_device
from profiler.documents import adapter, dump, make, parse, to_data
from profiler.errors import InvalidInput
from profiler.layer_graph import LayerGraph
from profiler.links import Links
from profiler.models import MODELS, names
from profiler.records import Unlike, build, plain
from tests.planner.instances import make_instance
from tests.planner.measured_instances import make_measured

PACKAGES = Path(topology_files.__file__).parent.parent


def written_by_pydantic(record: Any) -> Any:
    return adapter(type(record)).dump_python(record, mode="json", exclude_defaults=True)


def check_alike(kind: type[Any], data: Any) -> Any:
    """Both read `data` as one record, and write that alike; `repr` tells 1 from 1.0."""
    record = build(kind, data)
    assert repr(record) == repr(parse(kind, data, "here"))
    assert repr(plain(record)) == repr(written_by_pydantic(record))
    return record


SHIPPED = [
    *((LayerGraph, MODELS / f"{name}.json") for name in names()),
    *((Device, PACKAGES / f"profiler/devices/{name}.json") for name in device_names()),
    *((Stack, FITTED.parent / f"{name}.json") for name in stack_names()),
    (FittedConstants, FITTED), (Capabilities, PACKAGES / "executor/capabilities.json"),
    (Capabilities, PACKAGES / "planner/targets/any.json")]


def test_shipped_documents() -> None:
    files = {path for package in ("planner", "profiler", "executor")
             for path in (PACKAGES / package).rglob("*.json")}
    presets = {topology_files.PRESETS / f"{name}.json" for name in topology_files.names()}
    assert files == {path for _, path in SHIPPED} | presets
    for kind, path in SHIPPED:
        check_alike(kind, json.loads(path.read_text()))


def test_presets() -> None:
    for name in topology_files.names():
        check_alike(Topology, to_data(topology_files.resolve(f"{name}:2")))


def made_documents() -> Iterator[Any]:
    """Records of every kind, with every kind of part."""
    for seed in range(6):
        instance = make_measured(seed)
        yield from (instance.graph, instance.topology, instance.request)
        if instance.topology.links is not None:
            yield instance.topology.links
    instance = make_instance(1)
    yield replace(search.search(instance.graph, instance.topology, instance.request),
                  notes=("a",))


def test_made_documents() -> None:
    seen = set()
    for record in made_documents():
        seen.add(type(record))
        assert check_alike(type(record), json.loads(dump(record))) == record
        assert to_data(record) == json.loads(dump(record))
    assert seen == {LayerGraph, Topology, Request, Links, Layout}


def test_numbers_are_written_as_the_type_says() -> None:
    layout = next(record for record in made_documents() if isinstance(record, Layout))
    assert layout.prediction is not None and layout.proof is not None
    whole = replace(layout, prediction=replace(layout.prediction, step_terms_s={"a": 0, "b": 2}),
                    proof=replace(layout.proof, gap=0))
    assert repr(plain(whole)) == repr(written_by_pydantic(whole))
    assert plain(whole)["prediction"]["step_terms_s"] == {"a": 0.0, "b": 2.0}
    assert repr(plain(whole)["proof"]["gap"]) == "0.0"


STRANGE: list[Any] = [None, True, 0, -1, 1.0, 0.5, float("nan"), float("inf"), 10**400, "", "1",
                      "x" * 3000, "\ud800", "é", [], {}, [1], {"a": 1}, 2**40, -(2**70), b"a",
                      (1, 2), {1}]


def places(data: Any) -> Iterator[tuple[Any, Any]]:
    """(container, key) of every value in data."""
    for key in list(data) if isinstance(data, dict) else range(len(data)):
        yield data, key
        if isinstance(data[key], (dict, list)):
            yield from places(data[key])


def test_nothing_is_accepted_that_pydantic_refuses() -> None:
    rng = random.Random(0)
    documents = [(type(record), json.loads(dump(record))) for record in made_documents()]
    documents.append((Device, to_data(load_device("h100-sxm-80g"))))
    accepted = refused = 0
    for number in range(3000):
        kind, original = documents[number % len(documents)]
        data = copy.deepcopy(original)
        container, key = rng.choice(list(places(data)))
        change = rng.randrange(3)
        if change == 0:
            del container[key]
        elif change == 1 and isinstance(container, dict):
            container[rng.choice(["unknown", "name", "version"])] = rng.choice(STRANGE)
        else:
            container[key] = rng.choice(STRANGE)
        try:
            record = build(kind, data)
        except ValueError:
            refused += 1
            continue
        accepted += 1
        assert repr(adapter(kind).validate_python(data)) == repr(record)
    assert accepted > 200 and refused > 1000


@pytest.mark.parametrize(("kind", "data"), [
    (Request, {"global_batch": "8", "seq_len": 1}), (Request, {"global_batch": 8}),
    (Request, {"global_batch": 0, "seq_len": 1}), (Request, {"global_batch": True, "seq_len": 1}),
    (Request, {"global_batch": 1, "seq_len": 1, "colour": 1}), (Request, None), (Request, []),
    (Request, {"global_batch": 1, "seq_len": 1, "precision": "int3"}),
    (Request, {"global_batch": 1, "seq_len": 1, "memory_margin": float("nan")}),
    (Request, {"global_batch": 1, "seq_len": 1, "memory_margin": 0.95}),
    (Request, {"global_batch": 1, "seq_len": 1, "target": "x" * 101}),
    (Topology, {"name": "", "hosts": []})])
def test_refused_and_left_to_pydantic(kind: type[Any], data: Any) -> None:
    with pytest.raises(Unlike):
        build(kind, data)
    try:
        expected = adapter(kind).validate_python(data)
    except ValidationError:
        with pytest.raises(InvalidInput, match="here: "):
            make(kind, data, "here")
    else:
        assert make(kind, data, "here") == expected


def test_what_a_record_refuses_itself_pydantic_explains() -> None:
    data = to_data(load_device("h100-sxm-80g"))
    data["matmul_efficiency"]["size"].reverse()
    with pytest.raises(InvalidInput, match=r"here: matmul_efficiency: sizes must increase"):
        make(Device, data, "here")


def test_records_inside_are_taken_as_they_are() -> None:
    device = load_device("h100-sxm-80g")
    assert load_capabilities("any") == load_capabilities("any")
    group = topology_files.resolve("dgx-h100").hosts[0]
    made = make(Topology, {"name": "a", "hosts": [group]}, "here")
    assert made.hosts[0] is group and group.device == device
    assert load_stack("pytorch-eager") is load_stack("pytorch-eager")
