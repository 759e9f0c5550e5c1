"""Which channels of a group matter least. Scores that need samples are sums over lanes on the fixed tree."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from shoal.compression.bounds import trace
from shoal.compression.groups import Group, GroupMember
from shoal.compression.layer_graph import batch_norms_after
from shoal.compression.units import rows_by_unit
from shoal.errors import ShoalError
from shoal.lanes.reduction_tree import Node, TreeSum, partial_nodes
from shoal.spec.compression.steps import CutStep, Kept, format_indices

ROUNDING = 1e-9
"""A share such as 1 - 0.9 may be smaller than it should be."""
LaneBatches = Iterable[Sequence[Any]]
"""For each step, the batch of each lane; None for a lane without samples."""
LossOf = Callable[[Any], Tensor]
OfLane = Callable[[Any], Tensor]
Scores = list[Tensor]


def by_magnitude(model: nn.Module, groups: Sequence[Group]) -> Scores:
    """The squared weights of a channel, each member's share of its layer."""
    return [_over_members(model, group, lambda p: p.detach().double().square()) for group in groups]


def by_taylor(model: nn.Module, groups: Sequence[Group], steps: LaneBatches, loss_of: LossOf) -> Scores:
    """The first-order change of the loss if a channel is removed, squared, over the batches of all lanes."""
    with taylor_of_lane(model, groups, loss_of) as of_lane:
        return scores_of(_sum_over_lanes(steps, of_lane), model, groups, "taylor")


def by_zeros(model: nn.Module, groups: Sequence[Group], steps: LaneBatches, run: Callable[[Any], Any]) -> Scores:
    """How often a channel is more than zero after its first layer and that layer's batch norm (one minus APoZ, before
    the activation). Heads have no activation: their scores are those of `by_magnitude`."""
    with activity_of_lane(model, groups, run) as of_lane:
        return scores_of(_sum_over_lanes(steps, of_lane), model, groups, "zeros")


@contextlib.contextmanager
def taylor_of_lane(model: nn.Module, groups: Sequence[Group], loss_of: LossOf) -> Iterator[OfLane]:
    """What a lane's batch adds to the scores of `by_taylor`."""

    def of_lane(batch: Any) -> Tensor:
        model.zero_grad(set_to_none=False)
        loss_of(batch).backward()  # type: ignore[no-untyped-call]
        return torch.cat([_over_members(model, group, _first_order) for group in groups])

    yield of_lane
    model.zero_grad(set_to_none=True)


@contextlib.contextmanager
def activity_of_lane(model: nn.Module, groups: Sequence[Group], run: Callable[[Any], Any]) -> Iterator[OfLane]:
    """What a lane's batch adds to the scores of `by_zeros`."""
    counts: dict[str, Tensor] = {}

    def note(name: str, *, last: bool) -> Any:
        def hook(module: nn.Module, args: Any, output: Tensor) -> None:
            rows = (output > 0).double()
            counts[name] = rows.flatten(0, -2).mean(0) if last else rows.transpose(0, 1).flatten(1).mean(1)

        return hook

    @torch.no_grad()
    def of_lane(batch: Any) -> Tensor:
        run(batch)
        return torch.cat([counts[name].cpu() for name in names]) if names else torch.zeros(0, dtype=torch.float64)

    names = [group.name for group in groups if group.kind == "channels"]
    norms = _batch_norms(model)
    layers = {name: model.get_submodule(norms.get(name, name)) for name in names}
    hooks = [m.register_forward_hook(note(name, last=isinstance(m, nn.Linear))) for name, m in layers.items()]
    try:
        yield of_lane
    finally:
        for hook in hooks:
            hook.remove()


def _batch_norms(model: nn.Module) -> dict[str, str]:
    """The batch norm after each layer that has one, by name; none of a model that cannot be traced."""
    with contextlib.suppress(ShoalError):
        return dict(batch_norms_after(trace(model)))
    return {}


def scores_of(total: Tensor, model: nn.Module, groups: Sequence[Group], importance: str) -> Scores:
    """The scores of each group, from the sum over lanes."""
    if importance == "taylor":
        return _apart(total, groups)
    counted = iter(_apart(total, [group for group in groups if group.kind == "channels"]))
    sized = by_magnitude(model, groups)
    return [next(counted) if group.kind == "channels" else sized[i] for i, group in enumerate(groups)]


def sum_of_some_lanes(batches: Mapping[int, Any], lanes: int, of_lane: OfLane) -> dict[Node, Tensor]:
    """A worker's part of the sum over the lanes of one step, from the batches of its lanes: nodes of the fixed tree.
    A lane without samples adds nothing."""
    tree: TreeSum[Tensor] = TreeSum(lanes, torch.add)
    for lane, batch in sorted(batches.items()):
        tree.push_lane(lane, None if batch is None else of_lane(batch))
    return {node: value for node, value in tree.partials.items() if value is not None}


def join_sums(parts: Sequence[tuple[Sequence[int], Mapping[Node, Tensor]]], lanes: int) -> Tensor | None:
    """The sum over all lanes, from the lanes and parts of each worker: the same bits for every division of the lanes.
    None if no lane had samples."""
    tree: TreeSum[Tensor] = TreeSum(lanes, torch.add)
    for own, sums in parts:
        for node in partial_nodes(own, lanes):
            tree.push(node, sums.get(node))
    return tree.total()


def cut_least(groups: Sequence[Group], scores: Scores, *, remove: float) -> CutStep:
    """Remove this share of the channels of every group, those with the smallest scores; of equals, the later ones."""
    kept = []
    for group, score in zip(groups, scores, strict=True):
        count = max(group.channels - math.floor(group.channels * remove + ROUNDING), 1)
        order = sorted(range(group.channels), key=lambda c: (-float(score[c]), c))
        kept.append(sorted(order[:count]))
    return cut_channels(groups, kept)


def cut_channels(groups: Sequence[Group], kept: Sequence[Sequence[int]]) -> CutStep:
    """Keep these channels of each group."""
    layers: dict[str, dict[str, Any]] = {}
    for group, channels in zip(groups, kept, strict=True):
        if group.kind == "module":
            layers[group.name] = {"heads": format_indices(channels)}
            continue
        for member in group.members:
            side = layers.setdefault(member.layer, {})
            columns = format_indices(sorted(i for c in channels for i in member.columns[c]))
            where = "inputs" if member.is_input else "out"
            side[where] = columns
            if group.kind == "filled":
                side["wide"] = where
    return CutStep(layers={name: Kept.model_validate(fields) for name, fields in layers.items()})


def share_of_layers(weights: Mapping[str, Tensor], share: float) -> dict[str, float]:
    """The share of its weights that each layer keeps, if this share of all is kept.

    A weight is compared with those of other layers by its share of the squares that its layer has left when all smaller
    ones are gone (Lee and others, 2021). Small layers then keep more."""
    scores = {}
    for name, weight in weights.items():
        squares = weight.double().flatten().square().sort(descending=True).values
        left = squares.cumsum(0)
        scores[name] = torch.where(left > 0, squares / left.clamp(min=torch.finfo(torch.float64).tiny), 0.0)
    everything = torch.cat(list(scores.values())).sort(descending=True).values
    least = everything[max(round(len(everything) * share), 1) - 1]
    return {name: max(int((score >= least).sum()), 1) / len(score) for name, score in scores.items()}


def _apart(total: Tensor, groups: Sequence[Group]) -> Scores:
    ends = list(accumulate(group.channels for group in groups))
    return [total[end - group.channels : end] for end, group in zip(ends, groups, strict=True)]


def _sum_over_lanes(steps: LaneBatches, of_lane: OfLane) -> Tensor:
    total: Tensor | None = None
    for batches in steps:
        lanes = len(batches)
        summed = join_sums([(range(lanes), sum_of_some_lanes(dict(enumerate(batches)), lanes, of_lane))], lanes)
        if summed is not None:
            total = summed if total is None else total + summed
    assert total is not None, "there are no samples"
    return total


def _first_order(parameter: Tensor) -> Tensor:
    if parameter.grad is None:
        return torch.zeros_like(parameter, dtype=torch.float64)
    return (parameter.detach().double() * parameter.grad.double()).square()


def _over_members(model: nn.Module, group: Group, value: Callable[[Tensor], Tensor]) -> Tensor:
    total = torch.zeros(group.channels, dtype=torch.float64)
    for member in group.members:
        total += _of_member(model.get_submodule(member.layer), member, value)
    return total


def _of_member(layer: Any, member: GroupMember, value: Callable[[Tensor], Tensor]) -> Tensor:
    """The mean over what belongs to a channel, as a share of the layer's mean."""
    if isinstance(layer, nn.RNNBase):
        weights: Any = layer.weight_ih_l0
        return _share_of_mean(rows_by_unit(layer, value(weights).cpu()).mean(1))
    own = getattr(layer, "in_proj_weight" if isinstance(layer, nn.MultiheadAttention) else "weight", None)
    if not isinstance(own, Tensor) or own.dim() < 2:
        return torch.zeros(len(member.columns), dtype=torch.float64)
    weight = value(own).cpu()
    rows = (weight.transpose(0, 1) if member.is_input or isinstance(layer, nn.Embedding) else weight).flatten(1)
    return _share_of_mean(rows.mean(1)[torch.tensor(member.columns)].mean(1))


def _share_of_mean(each: Tensor) -> Tensor:
    mean = float(each.mean())
    return each / mean if mean > 0 else each
