"""ONNX files: export, 8-bit quantisation after training, and a model that onnxruntime runs."""

from __future__ import annotations

import contextlib
import io
import itertools
import logging
import os
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from shoal.checkpoint.export import batch_dims
from shoal.checkpoint.files import atomic_replace
from shoal.compression.optional import load_library
from shoal.errors import describe_exception, error

OPSET = 20


def export_onnx(model: nn.Module, inputs: tuple[Any, ...], target: Path) -> None:
    """Write the model with a batch of any size. SH662 with the exporter's own words if it cannot."""
    onnx = load_library("onnx")
    load_library("onnxscript")
    if not inputs or not all(isinstance(value, Tensor) and value.dim() for value in inputs):
        raise error("SH662", "ONNX needs tensors as inputs, with the batch first", where="onnx")
    several = tuple(torch.cat([value, value])[:2] for value in inputs)
    shapes = batch_dims(model, inputs, torch.export.Dim("batch"))
    try:
        with _quiet(), torch.no_grad():
            program = torch.onnx.export(model.eval(), several, dynamo=True, dynamic_shapes=shapes, opset_version=OPSET)
        assert program is not None
        content = _without_traces(program.model_proto)
        onnx.checker.check_model(content)
    except Exception as failure:
        raise error("SH662", f"ONNX export failed: {describe_exception(failure)[:600]}", where="onnx") from failure
    with atomic_replace(target) as temporary:
        temporary.write_bytes(content.SerializeToString(deterministic=True))


def _without_traces(model: Any) -> Any:
    """The same graph without the exporter's notes: they hold paths of this machine and are larger than the graph."""
    del model.metadata_props[:]
    model.doc_string = ""
    for graph in (model.graph, *model.functions):
        del graph.metadata_props[:]
        for part in (*graph.node, *getattr(graph, "value_info", ()), *getattr(graph, "initializer", ())):
            del part.metadata_props[:]
            part.doc_string = ""
        for part in (*(model.graph.input), *(model.graph.output)):
            del part.metadata_props[:]
    return model


def _with_short_names(model: Any) -> Any:
    """The same graph with numbers as names of its values: the quantiser's names and notes of shapes are a good part of
    a small file. Inputs and outputs keep their names. A graph with graphs inside stays as it is."""
    graph = model.graph
    if any(attribute.HasField("g") or attribute.graphs for node in graph.node for attribute in node.attribute):
        return model
    del graph.value_info[:]
    names: dict[str, str] = {one.name: one.name for one in (*graph.input, *graph.output)} | {"": ""}
    free = (name for number in itertools.count() if (name := f"{number:x}") not in names)

    def short(name: str) -> str:
        if name not in names:
            names[name] = next(free)
        return names[name]

    for part in graph.initializer:
        part.name = short(part.name)
    for node in graph.node:
        node.name = ""
        for side in (node.input, node.output):
            side[:] = [short(name) for name in side]
    return model


Ranges = dict[str, tuple[float, float]]
"""The smallest and largest value of each activation of a file, by its name."""


def observe_ranges(source: Path, batches: Sequence[tuple[Tensor, ...]]) -> Ranges:
    """The ranges of the activations on these batches. Those of several workers are joined by their ends, so that
    neither order nor division matters."""
    if not batches:
        raise error("SH662", "there are no samples to calibrate with", where="int8")
    calibration: Any = load_library("onnxruntime.quantization.calibrate")
    with _prepared(source) as (prepared, graph):
        kinds = _only_layers(graph).get("op_types_to_quantize") or _quantisable()
        augmented = str(prepared.with_name("augmented.onnx"))
        calibrator = calibration.create_calibrator(str(prepared), kinds, augmented_model_path=augmented)
        calibrator.collect_data(_Batches([one.name for one in graph.input], batches))
        found = calibrator.compute_data()
        ends = {name: [end.item() for end in one.range_value] for name, one in found.items()}
        return {name: (low, high) for name, (low, high) in ends.items()}


def quantise_onnx(source: Path, target: Path, ranges: Mapping[str, tuple[float, float]]) -> None:
    """Write the file with 8-bit weights per channel and 8-bit activations of these ranges, in QDQ form."""
    tools: Any = load_library("onnxruntime.quantization")
    calibration: Any = load_library("onnxruntime.quantization.calibrate")
    onnx = load_library("onnx")
    limits = {name: tuple(np.float32(end).reshape(1) for end in ends) for name, ends in ranges.items()}
    known = calibration.TensorsData(tools.CalibrationMethod.MinMax, limits)
    with _prepared(source) as (prepared, graph):
        made, kept = prepared.with_name("made.onnx"), prepared.with_name("ranges.json")
        calibration.save_tensors_data(known, kept)
        tools.quantize_static(
            str(prepared),
            str(made),
            None,
            quant_format=tools.QuantFormat.QDQ,
            per_channel=True,
            activation_type=tools.QuantType.QUInt8,
            weight_type=tools.QuantType.QInt8,
            calibrate_method=tools.CalibrationMethod.MinMax,
            calibration_cache_path=kept,
            **_only_layers(graph),
        )
        content = _with_short_names(_without_traces(onnx.load(made))).SerializeToString(deterministic=True)
    with atomic_replace(target) as temporary:
        temporary.write_bytes(content)


@contextlib.contextmanager
def _prepared(source: Path) -> Iterator[tuple[Path, Any]]:
    """The file as the quantiser wants it, and its graph. Whatever fails in the quantiser is SH662."""
    prepare: Any = load_library("onnxruntime.quantization.shape_inference")
    onnx = load_library("onnx")
    try:
        with _quiet(), tempfile.TemporaryDirectory(prefix="shoal-") as scratch:
            prepared = Path(scratch, "prepared.onnx")
            prepare.quant_pre_process(str(source), str(prepared), skip_symbolic_shape=True)
            yield prepared, onnx.load(prepared).graph
    except Exception as failure:
        raise error("SH662", f"int8 failed: {describe_exception(failure)[:600]}", where="int8") from failure


def _quantisable() -> list[str]:
    """The operations that onnxruntime can quantise."""
    registry: Any = load_library("onnxruntime.quantization.registry")
    return sorted({*registry.QLinearOpsRegistry, *registry.QDQRegistry})


def _only_layers(graph: Any) -> dict[str, Any]:
    """What is quantised: everything that onnxruntime can; in a graph with attention only its layers and embeddings,
    because rounding the other operations costs more time and quality than it saves."""
    weights = {one.name for one in graph.initializer}
    products = [n.name for n in graph.node if n.op_type == "MatMul" and not weights.intersection(n.input)]
    kinds = ["Conv", "Gemm", "MatMul", "Gather"]
    return {"op_types_to_quantize": kinds, "nodes_to_exclude": products} if products else {}


class _Batches:
    """Batches in the form that onnxruntime reads."""

    def __init__(self, names: Sequence[str], batches: Sequence[tuple[Tensor, ...]]) -> None:
        self._rows = iter([dict(zip(names, map(_array, batch), strict=True)) for batch in batches])

    def get_next(self) -> dict[str, Any] | None:
        return next(self._rows, None)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return self._rows


def _array(value: Tensor) -> np.ndarray[Any, Any]:
    return value.detach().cpu().contiguous().numpy()


class OnnxModel(nn.Module):
    """An ONNX file as a module: tensors in, a tensor or a tuple of them out, on the CPU."""

    def __init__(self, path: Path, *, threads: int = 1) -> None:
        super().__init__()
        runtime = load_library("onnxruntime")
        options = runtime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = threads
        options.log_severity_level = 3
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        try:
            self._session = runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        except Exception as failure:
            what = describe_exception(failure)
            raise error("SH662", f"onnxruntime cannot load it: {what}", where=str(path)) from failure
        self._names = [one.name for one in self._session.get_inputs()]

    def forward(self, *inputs: Tensor) -> Any:
        feeds = dict(zip(self._names, map(_array, inputs), strict=True))
        found = [torch.from_numpy(np.asarray(value)) for value in self._session.run(None, feeds)]
        return found[0] if len(found) == 1 else tuple(found)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """The exporter and the quantiser print their progress."""
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()), open(os.devnull, "w") as nothing:
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        try:
            with contextlib.redirect_stderr(nothing):
                yield
        finally:
            logging.disable(logging.NOTSET)
