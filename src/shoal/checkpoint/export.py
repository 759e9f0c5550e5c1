"""Export a finished model to files that other programs read, and load weights from files, runs and checkpoints."""

from __future__ import annotations

import inspect
import json
import os
import platform
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import Any

import fsspec
import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from shoal.checkpoint.blobs import encode_blob, safetensors_header, safetensors_order
from shoal.checkpoint.files import atomic_replace, open_files
from shoal.checkpoint.manifest import step_from_path
from shoal.checkpoint.model_check import MODEL_INFO, WEIGHTS
from shoal.checkpoint.sha256 import weights_sha256
from shoal.checkpoint.sharded_files import NAMES_SECTION, PIECES_SECTION, AssembledTensors, open_pieces
from shoal.checkpoint.state_tree import State
from shoal.checkpoint.store import CheckpointStore, EmitEvent
from shoal.checkpoint.tensor_bytes import bytes_of, unsaveable_reason
from shoal.errors import ShoalError, error, from_os_error

PROGRAM = "model.pt2"
MODEL_SECTION = "model"
"""The section of a checkpoint's state that holds the weights by name."""
EVALUATED_SECTION = "evaluated"
"""The section with the weights that were evaluated, if they are not those that are trained."""
_VERSIONS = {name: version(name) for name in ("shoal", "torch", "safetensors")}
"""Read here, because that takes 20 ms: a forked process has it already."""
FIX_NO_WEIGHTS = "Give a run, a checkpoint or a .safetensors file."


def export_model(
    directory: str | os.PathLike[str],
    model: nn.Module,
    *,
    info: Mapping[str, Any],
    example_inputs: tuple[Any, ...] | None,
    program: bool,
    emit: EmitEvent,
) -> dict[str, Any]:
    """Write model.safetensors, model.json (also returned) and, if wanted and possible, model.pt2.

    model.json is removed first and written last: if it exists, the files that it describes are complete. Emits
    `export_skipped` for anything that cannot be exported. SH503 if the files cannot be written.
    """
    target = Path(directory)
    weights, left_out = _plain_weights(model)
    try:
        (target / MODEL_INFO).unlink(missing_ok=True)
        (target / PROGRAM).unlink(missing_ok=True)
        _write(target / WEIGHTS, encode_blob(weights, metadata={"format": "pt"}).chunks)
        exported = program and _export_program(target / PROGRAM, model, example_inputs, emit=emit)
        content = {**info, **_description(weights), "program": PROGRAM if exported else None}
        if left_out:
            content["left_out"] = left_out
            emit("export_skipped", what=WEIGHTS, reason=f"not plain tensors: {', '.join(left_out)}")
        _write(target / MODEL_INFO, [json.dumps(content, indent=2, default=str).encode()])
    except OSError as problem:
        raise write_error(problem, target) from problem
    return content


def export_sharded_model(
    directory: str | os.PathLike[str],
    weights: AssembledTensors,
    *,
    info: Mapping[str, Any],
    program: bool,
    emit: EmitEvent,
) -> dict[str, Any]:
    """`export_model` for a model that is larger than one worker's memory: written tensor by tensor."""
    target = Path(directory)
    specs = {name: weights.spec(name) for name in weights}
    chunks = (bytes_of(weights[name]) for name in safetensors_order(specs))
    try:
        (target / MODEL_INFO).unlink(missing_ok=True)
        (target / PROGRAM).unlink(missing_ok=True)
        _write(target / WEIGHTS, chain([safetensors_header(specs, metadata={"format": "pt"})], chunks))
        if program:
            emit("export_skipped", what=PROGRAM, reason="the model is spread over workers")
        content = {**info, **_description(weights), "program": None}
        _write(target / MODEL_INFO, [json.dumps(content, indent=2, default=str).encode()])
    except OSError as problem:
        raise write_error(problem, target) from problem
    return content


def load_weights(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Weights by name from a .safetensors file, a model, a run, a store of checkpoints, or a manifest in one.

    The finished model of a run takes precedence over its checkpoints. From a checkpoint, only the section `model` is
    read, or `evaluated` if there is one. SH501 if there is nothing to load, SH505 if a file is not safetensors, SH502
    if a checkpoint is damaged.
    """
    return dict(open_weights(path))


def open_weights(path: str | os.PathLike[str]) -> Mapping[str, Tensor]:
    """`load_weights` for callers that cannot hold all weights: where possible, a tensor is read on access."""
    where = os.fspath(path)
    if (step := step_from_path(where)) is not None:
        return _from_manifest(where, step)
    if "://" in where:
        return _from_url(where)
    if Path(where).is_file():
        return _SafetensorsFile(where)
    root = Path(where)
    for file in (root / WEIGHTS, root / "model" / WEIGHTS):
        if file.is_file():
            return _SafetensorsFile(str(file))
    for store in (root, root / "checkpoints"):
        if (store / "blobs").is_dir():
            return _from_store(store)
    raise error("SH501", "no weights here", where=where, fix=FIX_NO_WEIGHTS)


# ---- writing ----


def _plain_weights(model: nn.Module) -> tuple[dict[str, Tensor], list[str]]:
    """The plain tensors of the state dict, tied tensors under each of their names; and the names of its other
    entries."""
    state = model.state_dict()
    weights = {n: t for n, t in state.items() if isinstance(t, Tensor) and not unsaveable_reason(t)}
    return weights, [name for name in state if name not in weights]


def write_error(problem: OSError, target: Path) -> ShoalError:
    doing = "the model could not be written"
    full = from_os_error(problem, doing=doing, where=str(target))
    return full or error("SH503", f"{doing}: {problem}", where=str(target))


def _write(target: Path, chunks: Iterable[memoryview | bytes]) -> None:
    with atomic_replace(target) as temp, temp.open("wb") as file:
        file.writelines(chunks)


def _description(weights: Mapping[str, Tensor]) -> dict[str, Any]:
    return {
        "weights_sha256": weights_sha256(weights),
        "tensors": {n: {"dtype": str(t.dtype)[6:], "shape": list(t.shape)} for n, t in weights.items()},
        "versions": {"python": platform.python_version(), **_VERSIONS},
    }


def _export_program(target: Path, model: nn.Module, example_inputs: tuple[Any, ...] | None, *, emit: EmitEvent) -> bool:
    """Report any failure of torch.export as an event: the weights are already written and the export continues."""
    try:
        if not example_inputs:
            raise ValueError("there are no example inputs")
        if any(isinstance(value, Mapping) for value in example_inputs):
            raise ValueError("its inputs have names; `shoal export RUN --format pt2` writes it with inputs in order")
        save_program(model, example_inputs, target)
    except Exception as problem:
        reason = next(iter(str(problem).strip().splitlines()), "") or type(problem).__name__
        emit("export_skipped", what=PROGRAM, reason=reason)
        return False
    return True


def save_program(model: nn.Module, example_inputs: tuple[Any, ...], target: Path) -> None:
    """Write the model as torch.export traces it. Raises whatever tracing raises."""
    with _eval_mode(model), torch.no_grad():
        program = torch.export.export(
            model, example_inputs, dynamic_shapes=batch_dims(model, example_inputs, torch.export.Dim.AUTO)
        )
    with atomic_replace(target) as temp:
        torch.export.save(program, temp)


def batch_dims(model: nn.Module, inputs: tuple[Any, ...], dim: Any) -> tuple[Any, ...]:
    """Mark the first dimension of each tensor as a batch. `Dim.AUTO` is one of any size, unless the model specialises
    on this size. To torch, the inputs of a model that takes any number of them are one tuple."""
    dims = tuple({0: dim} if isinstance(x, Tensor) and x.dim() else None for x in inputs)
    kinds = [parameter.kind for parameter in inspect.signature(model.forward).parameters.values()]
    return (dims,) if kinds[:1] == [inspect.Parameter.VAR_POSITIONAL] else dims


@contextmanager
def _eval_mode(model: nn.Module) -> Iterator[None]:
    """Every module in evaluation mode; afterwards each module is back in its previous mode."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


# ---- reading ----


class _SafetensorsFile(Mapping[str, Tensor]):
    """A safetensors file on this machine."""

    def __init__(self, where: str) -> None:
        self._where = where
        with self._open() as file:
            self._names = list(file.keys())

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._names:
            raise KeyError(name)
        with self._open() as file:
            # A copy: mapped memory would change, or crash the process, when another process overwrites the file.
            tensor: Tensor = file.get_tensor(name).clone()
            return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    @contextmanager
    def _open(self) -> Iterator[Any]:
        with _wrap_read_errors(self._where), safetensors.safe_open(self._where, framework="pt") as file:
            yield file


def _from_url(where: str) -> dict[str, Tensor]:
    with _wrap_read_errors(where), fsspec.open(where, "rb") as file:
        return safetensors.torch.load(file.read())


@contextmanager
def _wrap_read_errors(where: str) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise error("SH501", "there is no such file", where=where, fix=FIX_NO_WEIGHTS) from None
    except (SafetensorError, OSError, ValueError, KeyError) as problem:
        raise error("SH505", f"not a safetensors file: {problem}", where=where) from None


def _from_manifest(where: str, step: int) -> Mapping[str, Tensor]:
    directory = where.rpartition("/")[0]
    root, _, name = directory.rpartition("/")
    store = CheckpointStore(root or ".", job_sha256=None, name=name)
    return _weights_at(store, step, where=where)


def _weights_at(store: CheckpointStore, step: int, *, where: str) -> Mapping[str, Tensor]:
    names = store.load(step, section=NAMES_SECTION)[1]
    if names is not None:
        saved = open_pieces(store.files, {PIECES_SECTION: store.load(step, section=PIECES_SECTION)[1]})
        return AssembledTensors(saved, {name: f"/model/{first}" for name, first in names.items()})
    evaluated = store.load(step, section=EVALUATED_SECTION)[1]
    weights = store.load(step, section=MODEL_SECTION)[1] if evaluated is None else evaluated
    return _model_section(weights, where=where)


def _from_store(root: Path) -> Mapping[str, Tensor]:
    files = open_files(root)
    names = sorted({path.split("/")[0] for path in files.sizes() if step_from_path(path) is not None})
    if len(names) > 1:
        fix = f"Give one of their manifests, such as {root / names[0]}/<step>.json."
        raise error("SH501", f"several runs share this store: {', '.join(names)}", where=str(root), fix=fix)
    store = CheckpointStore(root, job_sha256=None, name=names[0]) if names else None
    found = store.load_latest(section=MODEL_SECTION) if store else None  # the newest that is not damaged
    if store is None or found is None:
        raise error("SH501", "no checkpoint here is complete", where=str(root), fix=FIX_NO_WEIGHTS)
    return _weights_at(store, found[0].step, where=str(root))


def _model_section(section: State, *, where: str) -> dict[str, Tensor]:
    if not isinstance(section, dict):
        raise error("SH501", f"the checkpoint has no section '{MODEL_SECTION}'", where=where, fix=FIX_NO_WEIGHTS)
    return {name: tensor for name, tensor in section.items() if isinstance(tensor, Tensor)}
