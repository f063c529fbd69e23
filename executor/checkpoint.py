"""Checkpoints that any layout can resume: whole tensors by name, written in shards (torch DCP).

    <path>/step-00000120/meshwright.json     what it is: model digest, step, position, schedule
    <path>/step-00000120/*.distcp, .metadata    parameters, buffers and optimizer state, each rank
                                             its shards

A checkpoint is written under a name that ends in ".partial" and renamed when all of it is on disk:
a name without that ending is a whole checkpoint, and only such are looked at. Names are the model's
own; a parameter that several stages share is saved once; one whose shards are interleaved (see
`fused`) is saved in the original order.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from executor.fused import copy_whole
from profiler.documents import digest, read_data
from profiler.errors import InvalidInput

if TYPE_CHECKING:
    from executor.run import Run

__all__ = ["Saving", "latest", "load", "save"]

DOCUMENT = "meshwright.json"
VERSION = 2
_NAME = re.compile(r"step-(\d{8,})")


def latest(path: str | Path) -> Path | None:
    """The last whole checkpoint in a folder; half-written ones are passed over."""
    folder = Path(path)
    found = [child for child in folder.iterdir() if _NAME.fullmatch(child.name)
             and (child / DOCUMENT).is_file()] if folder.is_dir() else []
    return max(found, key=lambda child: int(child.name.removeprefix("step-")), default=None)


@dataclass(slots=True)
class Saving:
    """A checkpoint that is being written. final: where it is when it is whole."""

    final: Path
    _written: Future[Any] | None
    _document: str
    _problem: BaseException | None = None
    _renamed: threading.Event = field(default_factory=threading.Event)

    @property
    def _partial(self) -> Path:
        return _partial(self.final)

    def start(self) -> Saving:
        """Rename as soon as all of it is written: at once, or from the thread that writes."""
        if self._written is None:
            _on_first_rank(self._finish)
            self._renamed.set()
        else:
            self._written.add_done_callback(self._finish_later)
        return self

    def wait(self) -> None:
        """Return when it is whole; raises what kept it from being so."""
        self._renamed.wait()
        if self._problem is not None:
            raise self._problem

    def _finish_later(self, written: Future[Any]) -> None:
        """Rank 0's part of a write ends after every rank's: it wrote the list of their shards."""
        try:
            written.result()
            if dist.get_rank() == 0:
                self._finish()
        except OSError as error:
            self._problem = InvalidInput(f"{self.final}: cannot be written: "
                                         f"{error.strerror or error}")
        except BaseException as error:  # it is raised where it is waited for
            self._problem = error
        finally:
            self._renamed.set()

    def _finish(self) -> None:
        (self._partial / DOCUMENT).write_text(self._document, encoding="utf-8")
        for child in (*self._partial.iterdir(), self._partial):
            _flush(child)
        if self.final.exists():  # the same step, saved again
            shutil.rmtree(self.final)
        self._partial.replace(self.final)
        _flush(self.final.parent)


def _partial(final: Path) -> Path:
    return final.with_name(final.name + ".partial")


def save(run: Run, path: str | Path, position: dict[str, Any] | None = None,
         asynchronous: bool = False) -> Saving:
    """Write the state of a run as `<path>/step-<number>`. Every rank calls it, at the same step.

    asynchronous: the state is copied to host memory, and a thread of each rank writes the copy
        (`torch.distributed.checkpoint.async_save`), over a process group of its own.

    Raises:
        InvalidInput: the folder cannot be written.
    """
    final = Path(path) / f"step-{run.num_steps:08d}"
    _on_first_rank(lambda: _prepare_folder(_partial(final)))
    state = dict(_saved(run)) | _buffers(run)
    document = {"meshwright": "Checkpoint", "version": VERSION, "model": run.graph.name,
                "model_digest": digest(run.graph), "num_steps": run.num_steps,
                "position": position or {}, "scheduler": _plain_state(run.scheduler)}
    written = None
    if asynchronous:
        written = dcp.async_save(state, checkpoint_id=_partial(final),
                                 process_group=run.background_group())
    else:
        dcp.save(state, checkpoint_id=_partial(final))
    text = json.dumps(document, indent=1) + "\n"
    return Saving(final=final, _written=written, _document=text).start()


def load(run: Run, path: str | Path) -> dict[str, Any]:
    """Load the last whole checkpoint of a folder (or the one at `path`); returns its position.

    Raises:
        InvalidInput: there is none, or it is of another model.
    """
    folder = Path(path)
    found = folder if (folder / DOCUMENT).is_file() else latest(folder)
    if found is None or found.name.endswith(".partial"):
        raise InvalidInput(f"{path}: no whole checkpoint there (one is a folder step-... that "
                           f"holds "
                           f"{DOCUMENT})")
    document = read_data(found / DOCUMENT)
    if not isinstance(document, dict) or document.get("version") != VERSION:
        raise InvalidInput(f"{found / DOCUMENT}: not a checkpoint document of version {VERSION}")
    if document["model_digest"] != digest(run.graph):
        raise InvalidInput(f"{found}: is a checkpoint of model {document['model']!r} (digest "
                           f"{document['model_digest'][:19]}...), not of {run.graph.name!r} "
                           f"({digest(run.graph)[:19]}...)")
    _make_optimizer_state(run)
    targets = {key: (parameter, tensor) for key, parameter, tensor in _tensors(run)}
    state: dict[str, Any] = _buffers(run)
    for key, (parameter, tensor) in targets.items():
        whole = run.fused_of(parameter) is not None and tensor.dim() > 0
        state[key] = torch.empty(tensor.shape, dtype=tensor.dtype) if whole else tensor.detach()
    dcp.load(state, checkpoint_id=found)
    with torch.no_grad():
        for key, (parameter, tensor) in targets.items():
            fused = run.fused_of(parameter)
            if fused is not None and tensor.dim() > 0:
                copy_whole(tensor, state[key], fused, run.layout.mesh.tp)
    if run.scheduler is not None and document["scheduler"]:
        _load_scheduler(run, document["scheduler"])
    run.num_steps = int(document["num_steps"])
    return dict(document["position"])


def _tensors(run: Run) -> Iterator[tuple[str, nn.Parameter, torch.Tensor]]:
    """(key, parameter, tensor) of all this rank holds: the parameters and their optimizer state."""
    for name, _, parameter in run.named_parameters():
        yield f"model/{name}", parameter, parameter.data
        if run.optimizer is not None:
            for key, value in run.optimizer.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor):
                    yield f"optimizer/{name}/{key}", parameter, value


def _buffers(run: Run) -> dict[str, torch.Tensor]:
    """Persistent buffers (running statistics), which all ranks of a stage have alike."""
    return {f"buffers/{name}": buffer.detach() for stage in run.stages.values()
            for name, buffer in stage.named_own_buffers()}


def _saved(run: Run) -> Iterator[tuple[str, torch.Tensor]]:
    for key, parameter, tensor in _tensors(run):
        interleaved_shards = run.fused_of(parameter) is not None and tensor.dim() > 0
        # a collective, over the ranks that hold this parameter: they come here in one order
        yield key, run.whole(parameter, tensor).cpu() if interleaved_shards else tensor.detach()


def _make_optimizer_state(run: Run) -> None:
    """Have the optimizer make its state, by a step that changes nothing."""
    if run.optimizer is None:
        return
    rates = [group["lr"] for group in run.optimizer.param_groups]
    for group in run.optimizer.param_groups:
        group["lr"] = torch.zeros_like(group["lr"]) if torch.is_tensor(group["lr"]) else 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    run.optimizer.step()
    run.optimizer.zero_grad(set_to_none=True)
    for group, rate in zip(run.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def _plain_state(scheduler: Any) -> dict[str, Any]:
    """The part of a learning-rate schedule's state that is plain numbers."""
    if scheduler is None:
        return {}
    return {key: value for key, value in scheduler.state_dict().items()
            if isinstance(value, (int, float, str, bool))
            or (isinstance(value, list) and all(isinstance(v, (int, float)) for v in value))}


def _load_scheduler(run: Run, state: dict[str, Any]) -> None:
    """Continue a learning-rate schedule; its state does not reach the optimizer by itself."""
    run.scheduler.load_state_dict({**run.scheduler.state_dict(), **state})
    rates = getattr(run.scheduler, "_last_lr", None)
    if run.optimizer is not None and rates:
        for group, rate in zip(run.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate


def _prepare_folder(partial: Path) -> None:
    try:
        if partial.exists():  # left by a run that died while saving
            shutil.rmtree(partial)
        partial.mkdir(parents=True)
    except OSError as error:
        raise InvalidInput(f"{partial}: cannot be written: {error.strerror or error}") from None


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _on_first_rank(action: Any) -> None:
    """Run `action` on rank 0; its failure is everyone's. All ranks wait."""
    problem: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            action()
        except InvalidInput as error:
            problem = [str(error)]
        except OSError as error:
            problem = [f"{error.filename or 'checkpoint'}: cannot be written: "
                       f"{error.strerror or error}"]
    dist.broadcast_object_list(problem, src=0)
    if problem[0] is not None:
        raise InvalidInput(problem[0])
