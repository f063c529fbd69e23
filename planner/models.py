"""The catalogue of models, and what a person may name instead (`profiler/models.py`)."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from profiler.documents import read_shipped
from profiler.models import MODELS, is_hugging_face, names, resolve

__all__ = ["CatalogueEntry", "catalogue", "is_hugging_face", "names", "resolve"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogueEntry:
    """What `plan models` says of one model."""

    name: str
    num_parameters: int
    num_layers: int
    sample: str
    max_seq_len: int | None
    note: str


def catalogue() -> list[CatalogueEntry]:
    """Every model of the catalogue, families together; the files are read, not validated."""
    entries = [_entry(name) for name in names()]
    return sorted(entries, key=lambda e: (e.name.rsplit("-", 1)[0], e.num_parameters))


def _entry(name: str) -> CatalogueEntry:
    data = read_shipped(MODELS / f"{name}.json")
    sizes = {kind: {p["name"]: prod(p["shape"]) for p in costs.get("parameters", ())}
             for kind, costs in data["kinds"].items()}
    kinds = [layer["kind"] for layer in data["layers"]]
    total = sum(sum(sizes[kind].values()) for kind in kinds)
    repeated = sum(sizes[kinds[layer]][parameter] for tie in data.get("ties", ())
                   for layer, parameter in tie["places"][1:])
    return CatalogueEntry(
        name=name, num_parameters=total - repeated, num_layers=len(kinds),
        sample=data.get("sample", "tokens"), max_seq_len=data.get("max_seq_len"),
        note=data.get("source", {}).get("note", ""))
