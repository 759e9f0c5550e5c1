"""The actions that a driver asks for. Each gets typed data, writes files below `out`, and returns typed data."""

from __future__ import annotations

import copy
import platform
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter
from safetensors.torch import load_file
from torch import nn

from shoal.checkpoint.example_inputs import describe_example
from shoal.checkpoint.export import export_model
from shoal.compression.bounds import Bounds
from shoal.compression.groups import Groups, tensors_in
from shoal.compression.importance import (
    activity_of_lane,
    by_magnitude,
    cut_least,
    join_sums,
    scores_of,
    share_of_layers,
    sum_of_some_lanes,
    taylor_of_lane,
)
from shoal.compression.lossless import FoundCut, cut_from_box, cut_from_samples, fold_step
from shoal.compression.measure import measure_in_turns
from shoal.compression.onnx_files import Ranges, export_onnx, observe_ranges, quantise_onnx
from shoal.compression.packed_file import check_packable, write_packed
from shoal.compression.shape import (
    CONVOLUTIONS,
    apply_steps,
    computed_parameter,
    computed_reason,
    count_parameters,
    dense_steps,
    low_rank_step,
    plain_state,
)
from shoal.data.fitted import Fitted
from shoal.errors import describe_exception, error
from shoal.events import EventWriter
from shoal.lanes.torch_setup import prepare_torch
from shoal.spec.compression.measured import Certificate, ModelFile, ShapedModel
from shoal.spec.compression.steps import ShapeStep
from shoal.spec.job import Job
from shoal.spec.run_paths import RunPaths
from shoal.train.compression.quality import judge
from shoal.train.compression.subject import Subject, artefact_of, check_own_inputs, save_weights, single_input

PROOF_SAMPLES = 512
PROOF_POINTS = 2000
IMPORTANCE_SAMPLES = 1024
_STEPS: TypeAdapter[list[Any]] = TypeAdapter(list[ShapeStep])
_RANGES: TypeAdapter[Ranges] = TypeAdapter(Ranges)


def answer(job: Job, paths: RunPaths, stream: EventWriter, *, action: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """The answer of one action, as plain data."""
    prepare_torch(job)
    found: dict[str, Any] = ACTIONS[action](Subject(job), **arguments)
    return found


def _file(value: Any) -> ModelFile:
    return ModelFile.model_validate(value)


def _shaped(subject: Subject, file: ModelFile, steps: list[Any], out: str, **facts: Any) -> dict[str, Any]:
    """Apply the steps to the model of the file and save the weights."""
    model = apply_steps(subject.model(file), steps)
    weights = save_weights(model.state_dict(), Path(out))
    made = ShapedModel(steps=steps, weights=weights, parameters=count_parameters(model), **facts)
    return made.model_dump(mode="json")


def describe(subject: Subject, *, file: Any, out: str) -> dict[str, Any]:
    """The model as it is, saved once more: its size is compared with that of others. `steps` are those that the ladder
    starts with, and are not taken here."""
    model = subject.model(_file(file))
    weights = save_weights(model.state_dict(), Path(out))
    made = ShapedModel(steps=dense_steps(model), weights=weights, parameters=count_parameters(model))
    return made.model_dump(mode="json")


def apply(subject: Subject, *, file: Any, steps: Any, out: str) -> dict[str, Any]:
    """Known steps, from a recipe."""
    return _shaped(subject, _file(file), _STEPS.validate_python(steps), out)


def fold(subject: Subject, *, file: Any, out: str) -> dict[str, Any]:
    """Batch norms as part of the layers before them."""
    model_file = _file(file)
    step = fold_step(subject.model(model_file), tuple(next(subject.train_batches(2)).inputs))
    return _shaped(subject, model_file, [step], out) if step else ShapedModel().model_dump(mode="json")


def lossless(subject: Subject, *, file: Any, out: str, claim: str, box: str) -> dict[str, Any]:
    """Everything that can go without an error: with a proof for a box of inputs, or on the training samples."""
    model_file = _file(file)
    model = subject.model(model_file)
    batch = next(subject.train_batches(64))
    check_own_inputs(subject.task(model_file.shape), model, batch)
    steps: list[Any] = [step for step in [fold_step(model, (single_input(batch),))] if step]
    folded = apply_steps(copy.deepcopy(model), steps)
    bounds = input_box(subject, per_feature=box == "features")
    if claim == "proven":
        cut = cut_from_box(folded.double(), bounds)
    else:
        cut = cut_from_samples(folded, (single_input(b) for b in subject.train_batches(len(subject.data.train), 256)))
    steps += [cut.step] if cut.step else []
    if not steps:
        return ShapedModel(refused=dict(cut.refused)).model_dump(mode="json")
    certificate = _certify(subject, model, steps, bounds, claim)
    return _shaped(subject, model_file, steps, out, certificate=certificate, **_facts(cut))


def _facts(cut: FoundCut) -> dict[str, Any]:
    return {"removed": dict(cut.removed), "refused": dict(cut.refused)}


@torch.no_grad()
def _certify(subject: Subject, model: nn.Module, steps: list[Any], box: Bounds, claim: str) -> Certificate:
    """Measure the largest difference of outputs, on training samples and on random points of the box."""
    changed = apply_steps(copy.deepcopy(model), steps)
    exact = copy.deepcopy(model).double()
    exact_changed = apply_steps(copy.deepcopy(exact), steps)
    single: list[float] = []
    double: list[tuple[float, float]] = []
    points: list[tuple[float, float]] = []
    samples = 0
    for batch in subject.train_batches(PROOF_SAMPLES):
        x = single_input(batch)
        single.append(_difference(model, changed, x)[0])
        double.append(_difference(exact, exact_changed, x.double()))
        samples += batch.size
    generator = torch.Generator().manual_seed(subject.job.seed)
    for _ in range(PROOF_POINTS // 100):
        share = torch.rand((100, *box.low.shape[1:]), dtype=torch.float64, generator=generator)
        points.append(_difference(exact, exact_changed, box.low + share * (box.high - box.low)))
    return Certificate(
        claim=claim,
        low=float(box.low.min()),
        high=float(box.high.max()),
        samples=samples,
        points=PROOF_POINTS,
        difference_float64=_largest([difference for difference, _ in double]),
        difference_float32=_largest(single),
        difference_points=_largest([difference for difference, _ in points]),
        largest_output=_largest([size for _, size in [*double, *points]]),
    )


def _difference(one: nn.Module, other: nn.Module, inputs: torch.Tensor) -> tuple[float, float]:
    """The largest absolute difference of the outputs, and the largest absolute output."""
    outputs, changed = list(tensors_in(one(inputs))), list(tensors_in(other(inputs)))
    differences = [float((a - b).abs().max()) for a, b in zip(outputs, changed, strict=True)]
    return _largest(differences), _largest([float(a.abs().max()) for a in outputs])


def _largest(values: list[float]) -> float:
    """NaN if one of them is, which `max` may pass over."""
    return float(torch.tensor(values, dtype=torch.float64).max())


def input_box(subject: Subject, *, per_feature: bool) -> Bounds:
    """The smallest and largest values of the training samples: of all inputs together, or of each for itself."""
    low = high = None
    for batch in subject.train_batches(len(subject.data.train), 256):
        x = single_input(batch).double()
        small, large = x.amin(0, keepdim=True), x.amax(0, keepdim=True)
        low = small if low is None else torch.minimum(low, small)
        high = large if high is None else torch.maximum(high, large)
    assert low is not None
    assert high is not None
    if not per_feature:
        low, high = low.min().expand_as(low).clone(), high.max().expand_as(high).clone()
    return Bounds(low, high)


def scores(subject: Subject, *, file: Any, out: str, importance: str, lanes: list[int]) -> dict[str, Any]:
    """A worker's part of the scores of channels: the sums over its lanes, by step and node of the tree."""
    model_file = _file(file)
    model, task = subject.model(model_file), subject.task(model_file.shape)
    groups = _groups(subject, model).found
    if importance == "taylor":
        measuring = taylor_of_lane(model, groups, lambda batch: _mean_loss(task.loss(model, batch)))
    else:
        measuring = activity_of_lane(model, groups, lambda batch: task.predict(model, batch))
    found: dict[str, torch.Tensor] = {}
    with measuring as of_lane:
        for step, batches in enumerate(subject.lane_batches(IMPORTANCE_SAMPLES, lanes)):
            sums = sum_of_some_lanes(batches, subject.job.lane_count, of_lane)
            found |= {f"{step}/{level}/{index}": value for (level, index), value in sums.items()}
    return {"path": save_weights(found, Path(out)).path, "lanes": lanes}


def _joined_scores(subject: Subject, parts: list[Any]) -> torch.Tensor:
    """The sum over steps and lanes, from the parts of all workers. SH662 if there are no samples."""
    found = [([int(lane) for lane in one["lanes"]], load_file(str(one["path"]))) for one in parts]
    nodes: dict[int, list[dict[tuple[int, int], torch.Tensor]]] = {}
    for number, (_, values) in enumerate(found):
        for name, value in values.items():
            step, level, index = map(int, name.split("/"))
            nodes.setdefault(step, [{} for _ in found])[number][level, index] = value
    total: torch.Tensor | None = None
    for step in sorted(nodes):
        own = [(lanes, sums) for (lanes, _), sums in zip(found, nodes[step], strict=True)]
        summed = join_sums(own, subject.job.lane_count)
        assert summed is not None
        total = summed if total is None else total + summed
    if total is None:
        raise error("SH662", "there are no samples to measure importance with", where="prune")
    return total


def _groups(subject: Subject, model: nn.Module) -> Groups:
    """SH662 if no layer can be cut."""
    groups = subject.groups(model, tuple(next(subject.train_batches(2)).inputs))
    if not groups.found:
        why = "; ".join(f"{name}: {text}" for name, text in list(groups.refused.items())[:5])
        raise error("SH662", f"no layer can be cut ({why})", where="prune")
    return groups


def prune(subject: Subject, *, file: Any, out: str, remove: float, importance: str, parts: list[Any]) -> dict[str, Any]:
    """Remove the channels that matter least; `parts` are what workers answered to `scores`."""
    model_file = _file(file)
    model = subject.model(model_file)
    groups = _groups(subject, model)
    if importance == "magnitude":
        found = by_magnitude(model, groups.found)
    else:
        found = scores_of(_joined_scores(subject, parts), model, groups.found, importance)
    cut = cut_least(groups.found, found, remove=remove)
    _check_shape(subject, apply_steps(copy.deepcopy(model), [cut]))
    return _shaped(subject, model_file, [cut], out, refused=dict(groups.refused))


def _mean_loss(loss: Any) -> torch.Tensor:
    mean: torch.Tensor = loss[0] / loss[1] if isinstance(loss, tuple) else loss
    return mean


def low_rank(subject: Subject, *, file: Any, out: str, share: float) -> dict[str, Any]:
    """Dense layers as products, where that has fewer weights."""
    model_file = _file(file)
    model = subject.model(model_file)
    step, refused = low_rank_step(model, share)
    if step is None:
        raise error("SH662", "no dense layer becomes smaller as a product", where="low_rank")
    _check_shape(subject, apply_steps(model, [step]))
    return _shaped(subject, model_file, [step], out, refused=refused)


def _check_shape(subject: Subject, model: nn.Module) -> None:
    """SH662 if the user's own code does not accept the shape."""
    try:
        with torch.no_grad():
            plain_model, inputs = subject.plain(model, next(subject.train_batches(2)).inputs)
            plain_model(*inputs)
    except Exception as failure:
        what = describe_exception(failure)
        raise error("SH662", f"the model's code does not accept the shape: {what}", where="shape") from failure


def zero(subject: Subject, *, file: Any, out: str, keep: dict[str, float]) -> dict[str, Any]:
    """Set the smallest weights of layers to zero."""
    model_file = _file(file)
    model = subject.model(model_file)
    with torch.no_grad():
        for name, share in keep.items():
            weight: Any = model.get_submodule(name).weight
            count = max(round(weight.numel() * share), 1)
            order = weight.abs().flatten().sort(descending=True, stable=True).indices
            mask = torch.zeros(weight.numel(), dtype=torch.bool)
            mask[order[:count]] = True
            weight.mul_(mask.reshape(weight.shape))
    weights = save_weights(model.state_dict(), Path(out))
    return ShapedModel(weights=weights, parameters=count_parameters(model)).model_dump(mode="json")


def layers(subject: Subject, *, file: Any, packed: bool) -> dict[str, Any]:
    """Dense layers and convolutions, with their numbers of weights. SH662 if a packed file is to be made of the model,
    and could not hold it: nothing is trained in vain."""
    model = subject.model(_file(file))
    if packed:
        check_packable(model.state_dict())
    return {"weights": {name: weight.numel() for name, weight in _layer_weights(model).items()}}


def kept_by_layer(subject: Subject, *, file: Any, share: float) -> dict[str, Any]:
    """The share of the weights that each layer keeps, if the model keeps this share of them."""
    return {"keep": share_of_layers(_layer_weights(subject.model(_file(file))), share)}


def _layer_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """A weight that two layers share is left as it is: one of them would not see what the other one's became. So is one
    that is computed from others. SH662 if no layer is left."""
    kinds = (nn.Linear, *CONVOLUTIONS)
    owners = Counter(id(p) for layer in model.modules() for p in layer.parameters(recurse=False))
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, kinds)}
    own = {name: layer.weight for name, layer in layers.items() if computed_parameter(layer) is None}
    found = {name: weight.detach() for name, weight in own.items() if owners[id(weight)] == 1}
    if not found:
        why = "; ".join(f"'{name}': {computed_reason('weight')}" for name in layers if name not in own)
        raise error("SH662", f"no layer has a weight of its own{f' ({why})' if why else ''}", where="shape")
    return found


def plain(subject: Subject, *, file: Any, out: str, held: list[str]) -> dict[str, Any]:
    """The weights at the values that are used, without the masks, codes and rounding that held these layers."""
    model = subject.model(_file(file))
    weights = save_weights(plain_state(model, held), Path(out))
    return ShapedModel(weights=weights, parameters=count_parameters(model)).model_dump(mode="json")


def onnx(subject: Subject, *, file: Any, out: str) -> dict[str, Any]:
    """Write the model for onnxruntime, with 32-bit floats."""
    model, example = subject.model(_file(file)), next(subject.train_batches(2))
    export_onnx(*subject.plain(model, tuple(example.inputs)), Path(out))
    return _compared(subject, model, Path(out), file)


def ranges(subject: Subject, *, path: str, samples: int, lanes: list[int]) -> dict[str, Any]:
    """A worker's part of the calibration: the ranges of a file's activations on the batches of its lanes."""
    batches = [b for step in subject.lane_batches(samples, lanes) for b in step.values() if b]
    values = [subject.plain(nn.Identity(), tuple(b.inputs))[1] for b in batches]
    return {"ranges": observe_ranges(Path(path), values) if batches else {}}


def int8(subject: Subject, *, file: Any, path: str, out: str, ranges: Any) -> dict[str, Any]:
    """Write the ONNX file again with 8 bits."""
    known = _RANGES.validate_python(ranges)
    if not known:
        raise error("SH662", "there are no samples to calibrate with", where="int8")
    quantise_onnx(Path(path), Path(out), known)
    return _compared(subject, subject.model(_file(file)), Path(out), file)


def _compared(subject: Subject, model: nn.Module, target: Path, file: Any) -> dict[str, Any]:
    """The written file, with the largest difference of its outputs, loaded back."""
    batch = next(subject.train_batches(64))
    back = subject.model(_file(file).model_copy(update={"path": str(target)}))
    with torch.no_grad():
        (one, inputs), (other, _) = (subject.plain(made, batch.inputs) for made in (model, back))
        pairs = zip(tensors_in(one(*inputs)), tensors_in(other(*inputs)), strict=True)
        difference = _largest([float((a - b).abs().max()) for a, b in pairs])
    return artefact_of(target).model_copy(update={"difference": difference}).model_dump(mode="json")


def pack(subject: Subject, *, file: Any, out: str, bits: int, rounded: list[str]) -> dict[str, Any]:
    """Write the weights with few bits, entropy coded."""
    model = subject.model(_file(file))
    buffers, of_rounded = dict(model.named_buffers()), {f"{name}.weight" for name in rounded}
    write_packed(Path(out), model.state_dict(), bits=bits, rounded=of_rounded, exact=buffers)
    return _compared(subject, model, Path(out), file)


def export(subject: Subject, *, file: Any, out: str, info: dict[str, Any], program: bool) -> dict[str, Any]:
    """Write the model's directory as a training does."""
    model, example = subject.model(_file(file)), next(subject.train_batches(2))
    skipped: list[str] = []

    def note(kind: str, /, **fields: Any) -> None:
        skipped.append(f"{fields.get('what')}: {fields.get('reason')}")

    content = export_model(
        out,
        model,
        info=info
        | {"example": describe_example(tuple(example.inputs))}
        | Fitted.of(subject.data.train.source).model_info(),
        example_inputs=tuple(example.inputs),
        program=program,
        emit=note,
    )
    return {
        "weights_sha256": content["weights_sha256"],
        "parameters": count_parameters(model),
        "samples": subject.data.sizes,
        "skipped": skipped,
        "platform": {
            "machine": platform.machine(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "cpu": torch.backends.cpu.get_cpu_capability(),
        },
    }


def quality(subject: Subject, *, parent: Any, models: dict[str, Any], part: str, known: str) -> dict[str, Any]:
    files = {name: _file(one) for name, one in models.items()}
    found = judge(subject, _file(parent), files, part=part, known=Path(known))
    return {"found": [one.model_dump(mode="json") for one in found]}


def latency(subject: Subject, *, models: dict[str, Any], sizes: list[int]) -> dict[str, Any]:
    """CPU time per call in turns, with one thread, as ratios to the first model."""
    torch.set_num_threads(1)
    example = next(subject.train_batches(1)).inputs
    built = {name: subject.plain(subject.model(_file(one)), example)[0] for name, one in models.items()}
    batches = {}
    for size in sizes:
        batch = next(subject.train_batches(size, size))
        if batch.size == size:
            batches[size] = subject.plain(nn.Identity(), batch.inputs)[1]
    return {"found": [one.model_dump(mode="json") for one in measure_in_turns(built, batches)]}


_ACTIONS = (
    describe,
    apply,
    fold,
    lossless,
    scores,
    prune,
    low_rank,
    zero,
    layers,
    kept_by_layer,
    plain,
    onnx,
    ranges,
    int8,
    pack,
    export,
    quality,
    latency,
)
ACTIONS: dict[str, Callable[..., dict[str, Any]]] = {action.__name__: action for action in _ACTIONS}
