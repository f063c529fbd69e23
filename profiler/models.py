"""Models by name and from files.

`resolve` accepts what a person types or writes:

    llama3-8b, llama-3-8b           a model of the catalogue (planner/models/*.json), or an alias
    ./config.json, ./checkpoint/    a Hugging Face config, or the folder that holds one
    profile.json                    a LayerGraph document, as the profiler writes it
    mypkg.models:build              a function that returns an nn.Module, example inputs and,
                                    if the module returns none, the loss

A catalogue name and a LayerGraph need no torch; the others are traced, and import it.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from profiler.documents import load_shipped, parse, read_data
from profiler.errors import InvalidInput, UnknownName

if TYPE_CHECKING:
    from profiler.layer_graph import LayerGraph

__all__ = ["FUNCTION", "MODELS", "is_hugging_face", "names", "resolve"]

MODELS = Path(__file__).parent.parent / "planner" / "models"
SUFFIXES = (".json", ".yaml", ".yml")
FUNCTION = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")

HINT = ("Or give a file (a Hugging Face config.json, a LayerGraph) or package.module:function; "
        "`plan models` lists the names.")
HUGGING_FACE_KEYS = ("model_type", "architectures")


def names() -> tuple[str, ...]:
    """Names of the catalogue."""
    return tuple(sorted(path.stem for path in MODELS.glob("*.json")))


def resolve(model: str | Path, *, name: str | None = None) -> LayerGraph:
    """The LayerGraph of a name, a file or a function.

    name: of the traced graph; by default the tracer's choice.

    Raises:
        UnknownName: no model of that name.
        InvalidInput: a file that holds no model, or a function that builds none.
    """
    text = str(model).strip()
    if (known := _catalogue_name(text)) is not None:
        return _of_catalogue(known)
    path = Path(text)
    if isinstance(model, Path) or text.endswith(SUFFIXES) or path.is_dir():
        return _from_file(path, name)
    if FUNCTION.fullmatch(text):
        return _from_function(text, name)
    if "/" in text or path.is_file():
        raise InvalidInput(f"{text[:200]}: a model file is .json or .yaml, or a folder that "
                           "holds a config.json")
    raise UnknownName("model", text[:80], names(), HINT)


def _catalogue_name(text: str) -> str | None:
    known = names()
    if text in known:
        return text
    from profiler.catalogue import ALIASES

    name = ALIASES.get(text.lower(), text.lower())
    return name if name in known else None


def _of_catalogue(name: str) -> LayerGraph:
    from profiler.layer_graph import LayerGraph

    return load_shipped(LayerGraph, MODELS / f"{name}.json")


def is_hugging_face(data: Any) -> bool:
    """Whether a document is a Hugging Face config: ours carry the key "meshwright"."""
    return (isinstance(data, dict) and "meshwright" not in data
            and any(key in data for key in HUGGING_FACE_KEYS))


def _from_file(path: Path, name: str | None) -> LayerGraph:
    if path.is_dir():
        path = path / "config.json"
    data = read_data(path)
    if is_hugging_face(data):
        _require_torch(str(path))
        from profiler.hugging_face import trace_hugging_face

        return trace_hugging_face(path, name=name)
    found = data.get("meshwright") if isinstance(data, dict) else None
    if found != "LayerGraph":
        what = f"a {found}" if isinstance(found, str) else "neither"
        raise InvalidInput(f"{path}: a model is a LayerGraph (\"meshwright\": \"LayerGraph\") or a "
                           f"Hugging Face config (\"model_type\"); this is {what[:60]}")
    from profiler.layer_graph import LayerGraph

    return parse(LayerGraph, data, str(path))


def _from_function(text: str, name: str | None) -> LayerGraph:
    _require_torch(text)
    from profiler.trace import trace_function

    return trace_function(text, name=name)


def _require_torch(what: str) -> None:
    try:
        import torch  # noqa: F401
    except ImportError as error:
        raise InvalidInput(f"{what[:200]}: tracing a model needs torch, which cannot be imported: "
                           f"{error}") from None
