"""Topologies by name and from files, and every way in which those can be wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from planner.topology_files import MAX_TOPOLOGY_BYTES, describe, names, resolve
from profiler.documents import dump
from profiler.errors import InvalidInput, UnknownName


def write(folder: Path, text: str, name: str = "cluster.json") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_a_name_is_one_host() -> None:
    topology = resolve("dgx-h100")
    assert (topology.name, topology.num_hosts, topology.num_devices) == ("dgx-h100", 1, 8)


def test_name_and_count() -> None:
    topology = resolve(" dgx-h100:16 ")
    assert (topology.name, topology.num_hosts, topology.num_devices) == ("dgx-h100:16", 16, 128)


def test_mixed_kinds_keep_their_order() -> None:
    topology = resolve("dgx-a100-80g:2+dgx-h100:2")
    assert [group.device.name for group in topology.hosts] == ["a100-80g", "h100-sxm-80g"]
    assert [group.count for group in topology.hosts] == [2, 2]


def test_a_topology_is_itself() -> None:
    topology = resolve("dgx-h100")
    assert resolve(topology) is topology


@pytest.mark.parametrize("name", names())
def test_presets_say_where_their_figures_are_from(name: str) -> None:
    topology = resolve(name)
    assert topology.name == name
    for group in topology.hosts:
        for link in (group.device_link, group.network_card):
            assert link.source.split(":")[0] in {"cited", "interpolated", "assumed", "measured"}
            assert link.latency_s > 0


@pytest.mark.parametrize("name", names())
def test_describe_is_one_line(name: str) -> None:
    line = describe(name)
    assert "\n" not in line
    assert resolve(name).hosts[0].device.name in line


def test_describe_a_mixed_cluster() -> None:
    line = describe("dgx-a100-80g:2+rtx4090x8:3")
    assert "2 hosts of 8 x a100-80g" in line
    assert "3 hosts of 8 x rtx-4090" in line
    assert "together" in line  # the common bus


@pytest.mark.parametrize("text", [
    "dgx-h100:0", "dgx-h100:-1", "dgx-h100:abc", "dgx-h100:99999999", "dgx-h100:99999", "dgx-h100:",
    "dgx-h100:2:3", "dgx-h100:+2", "dgx-h100:1e3", "dgx-h100:\u0661", "dgx-h100:" + "9" * 5000, "",
    "  ", "+", "dgx-h100+", ":4", "local+dgx-h100", "local:0", "local:x", "local:99999",
])
def test_malformed_names(text: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        resolve(text)
    assert len(caught.value.problems) == 1
    assert len(caught.value.problems[0]) < 400


@pytest.mark.parametrize(("text", "offer"), [
    ("dgx-h10", "dgx-h100"), ("DGX-H100", "dgx-h100"),
    ("dgx-a100:2", "dgx-a100-80g or dgx-a100-40g"), ("nothing-like-it", "known: aws-p4d"),
])
def test_unknown_names_offer_the_nearest(text: str, offer: str) -> None:
    with pytest.raises(UnknownName, match=offer):
        resolve(text)


def test_a_whole_document(tmp_path: Path) -> None:
    topology = resolve("dgx-a100-80g:2+dgx-h100:2")
    assert resolve(write(tmp_path, dump(topology))) == topology


COMPACT = """
name: mine
description: two boxes
nodes: 2
gpus_per_node: 4
device: l4
memory_bytes: 20000000000
intra_node: {bandwidth_bytes_per_s: 2.0e+10, latency_s: 5.0e-6, aggregate_bytes_per_s: 4.0e+10}
inter_node: {bandwidth_bytes_per_s: 3.0e+9, latency_s: 3.0e-5, efficiency: 0.5}
cards_per_node: 2
network: [{name: leaf, hosts_per_group: 2}]
"""


def test_the_compact_form(tmp_path: Path) -> None:
    topology = resolve(str(write(tmp_path, COMPACT, "cluster.yaml")))
    group = topology.hosts[0]
    assert (topology.name, topology.num_devices) == ("mine", 8)
    assert (group.count, group.devices_per_host, group.cards_per_host) == (2, 4, 2)
    assert group.device.memory_bytes == 20_000_000_000
    assert group.device.sources["memory_bytes"] == "given with the topology"
    assert group.device_link.aggregate_bytes_per_s == 4e10
    assert group.network_card.effective_bytes_per_s == 1.5e9
    assert topology.network[0].name == "leaf"


def test_a_preset_with_overrides(tmp_path: Path) -> None:
    text = """{"preset": "dgx-h100", "nodes": 4, "cards_per_node": 2, "device": "h200",
               "inter_node": {"bandwidth_bytes_per_s": 1e10}}"""
    topology = resolve(write(tmp_path, text))
    group, preset = topology.hosts[0], resolve("dgx-h100").hosts[0]
    assert topology.name == "cluster"  # the file's, where it says none
    assert (group.count, group.device.name, group.cards_per_host) == (4, "h200", 2)
    assert group.device_link == preset.device_link
    assert group.network_card.bandwidth_bytes_per_s == 1e10
    assert group.network_card.latency_s == preset.network_card.latency_s
    assert "changed: bandwidth_bytes_per_s" in group.network_card.source


def test_a_list_of_hosts(tmp_path: Path) -> None:
    text = """{"hosts": [{"preset": "dgx-h100", "nodes": 2}, {"preset": "dgx-a100-80g"}],
               "network": [{"name": "leaf", "hosts_per_group": 2, "uplink_bytes_per_s": 1e11}]}"""
    topology = resolve(write(tmp_path, text))
    assert [group.count for group in topology.hosts] == [2, 1]
    assert topology.network[0].uplink_bytes_per_s == 1e11


def test_one_node_needs_no_network(tmp_path: Path) -> None:
    text = """{"gpus_per_node": 2, "device": "l4",
               "intra_node": {"bandwidth_bytes_per_s": 1e9, "latency_s": 0}%s}"""
    assert resolve(write(tmp_path, text % "")).num_devices == 2
    with pytest.raises(InvalidInput, match="inter_node: missing; 2 nodes"):
        resolve(write(tmp_path, text % ', "nodes": 2'))
    alone = text % ""
    with pytest.raises(InvalidInput, match="inter_node: missing; several hosts"):
        resolve(write(tmp_path, f'{{"hosts": [{alone}, {alone}]}}'))


def link(value: str) -> str:
    return f'{{"preset": "dgx-h100", "inter_node": {{"bandwidth_bytes_per_s": {value}}}}}'


@pytest.mark.parametrize(("text", "message"), [
    ('{"preset": "dgx-h100", "nodez": 2}', "nodez: unknown key"),
    ('{"preset": "dgx-h100", "nodes": 0}', "nodes: .*greater than or equal to 1"),
    ('{"preset": "dgx-h100", "nodes": -3}', "nodes"),
    ('{"preset": "dgx-h100", "nodes": 2.5}', "nodes"),
    ('{"preset": "dgx-h100", "nodes": 1e30}', "nodes"),
    ('{"preset": "dgx-h100", "nodes": 131072}', "at most 131,072"),
    ('{"preset": "dgx-h100", "gpus_per_node": 0}', "gpus_per_node"),
    ('{"preset": "dgx-h100", "memory_bytes": 0}', "memory_bytes"),
    ('{"preset": "dgx-h100", "memory_bytes": 1e300}', "memory_bytes"),
    ('{"preset": "dgx-h100", "device": 7}', "device"),
    ('{"preset": "dgx-h100", "inter_node": 5}', "inter_node"),
    ('{"preset": "dgx-h100", "inter_node": {"gb_per_s": 5}}', "gb_per_s: unknown key"),
    ('{"preset": {}}', "preset: a name is needed"),
    ('{"nodes": 2, "hosts": [{"preset": "dgx-h100"}]}', "nodes: with `hosts`"),
    ('{"hosts": []}', "1 to 256 groups"),
    ('{"hosts": [1]}', "each must be a mapping"),
    ('{"meshwright": "Layout"}', "should be 'Topology'"),
    (link("0"), "greater than 0"), (link("-1"), "greater than 0"), (link("1e300"), "less than"),
    (link("1e999"), "finite"), (link("NaN"), "malformed JSON"), (link('"x"'), "valid number"),
    ('{"preset": "dgx-h100", "nodes": 2, "nodes": 4}', "'nodes' is given twice"),
    ("[1]", "a topology is a mapping"), ("", "malformed JSON"), ("[" * 100_000, "malformed JSON"),
])
def test_files_that_are_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        resolve(write(tmp_path, text))


def test_every_problem_is_said(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput) as caught:
        resolve(write(tmp_path, '{"nodes": 0, "gpus_per_node": -1, "colour": 3}'))
    assert "colour: unknown key" in str(caught.value)
    with pytest.raises(InvalidInput) as caught:
        resolve(write(tmp_path, '{"nodes": 0, "gpus_per_node": -1}'))
    assert len(caught.value.problems) == 4  # those two, and what is missing


def test_unknown_names_in_files(tmp_path: Path) -> None:
    with pytest.raises(UnknownName, match=r"did you mean .*h100-sxm-80g"):
        resolve(write(tmp_path, '{"preset": "dgx-h100", "device": "h100"}'))
    with pytest.raises(UnknownName, match="unknown topology 'dgx-x'"):
        resolve(write(tmp_path, '{"preset": "dgx-x"}'))


@pytest.mark.parametrize(("text", "message"), [
    ("a: &a [1, 1]\nb: [*a, *a]", "aliases"),
    ("a: &a {x: 1}\nb:\n  <<: *a", "aliases"),
    ("!!python/object/apply:os.system ['true']", "malformed YAML"),
    ("preset: dgx-h100\nnodes: 2\nnodes: 4", "'nodes' is given twice"),
    ("hosts:\n- {preset: dgx-h100, preset: dgx-a100-80g}", "'preset' is given twice"),
    ("preset: dgx-h100\nintra_node: {bandwidth_bytes_per_s: .nan}", "finite"),
    ("[" * 100_000, "nested deeper"),
    ("\n".join(" " * i + "a:" for i in range(900)), "nested deeper"),
    ("a: 1\n---\nb: 2", "malformed YAML"), ("1: 2", "a topology is a mapping"),
    ("", "a topology is a mapping"), ("a: 'b", "malformed YAML"),
])
def test_hostile_yaml(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        resolve(write(tmp_path, text, "cluster.yml"))


def test_large_and_missing_files(tmp_path: Path) -> None:
    large = write(tmp_path, " " * (MAX_TOPOLOGY_BYTES + 1))
    with pytest.raises(InvalidInput, match="at most"):
        resolve(large)
    with pytest.raises(InvalidInput, match="cannot be read"):
        resolve(tmp_path / "missing.json")
    with pytest.raises(InvalidInput, match="is a directory"):
        resolve(tmp_path)
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InvalidInput, match="UTF-8"):
        resolve(tmp_path / "binary.json")
