"""Which channels of a group matter least. Scores that need samples are sums over lanes on the fixed tree."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from shoal.compression.groups import Group, GroupMember
from shoal.lanes.reduction_tree import TreeSum
from shoal.spec.compression.steps import CutStep, Kept, format_indices

LaneBatches = Iterable[Sequence[Any]]
"""For each step, the batch of each lane; None for a lane without samples."""
LossOf = Callable[[Any], Tensor]
Scores = list[Tensor]


def by_magnitude(model: nn.Module, groups: Sequence[Group]) -> Scores:
    """The squared weights of a channel, each member's share of its layer."""
    return [_over_members(model, group, lambda p: p.detach().double().square()) for group in groups]


def by_taylor(model: nn.Module, groups: Sequence[Group], steps: LaneBatches, loss_of: LossOf) -> Scores:
    """The first-order change of the loss if a channel is removed, squared, over the batches of all lanes."""

    def of_lane(batch: Any) -> Tensor:
        model.zero_grad(set_to_none=False)
        loss_of(batch).backward()  # type: ignore[no-untyped-call]
        return torch.cat([_over_members(model, group, _first_order) for group in groups])

    total = _sum_over_lanes(steps, of_lane)
    model.zero_grad(set_to_none=True)
    return _apart(total, groups)


def by_zeros(model: nn.Module, groups: Sequence[Group], steps: LaneBatches, run: Callable[[Any], Any]) -> Scores:
    """How often a channel's first layer gives more than zero (one minus APoZ, before the activation). Heads have no
    activation: their scores are those of `by_magnitude`."""
    heads = {i: score for i, score in enumerate(by_magnitude(model, groups)) if groups[i].kind != "channels"}
    everything, groups = groups, [group for group in groups if group.kind == "channels"]
    counts: dict[str, Tensor] = {}

    def note(name: str, *, last: bool) -> Any:
        def hook(module: nn.Module, args: Any, output: Tensor) -> None:
            rows = (output > 0).double()
            counts[name] = rows.flatten(0, -2).mean(0) if last else rows.transpose(0, 1).flatten(1).mean(1)

        return hook

    hooks = [
        model.get_submodule(g.name).register_forward_hook(
            note(g.name, last=isinstance(model.get_submodule(g.name), nn.Linear))
        )
        for g in groups
    ]

    def of_lane(batch: Any) -> Tensor:
        run(batch)
        return torch.cat([counts[group.name].cpu() for group in groups])

    try:
        with torch.no_grad():
            scores = iter(_apart(_sum_over_lanes(steps, of_lane), groups) if groups else ())
    finally:
        for hook in hooks:
            hook.remove()
    return [heads[i] if i in heads else next(scores) for i in range(len(everything))]


def cut_least(groups: Sequence[Group], scores: Scores, *, remove: float) -> CutStep:
    """Remove this share of the channels of every group, those with the smallest scores; of equals, the later ones."""
    kept = []
    for group, score in zip(groups, scores, strict=True):
        count = max(group.channels - int(group.channels * remove), 1)
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
    """The share of its weights that each layer keeps, if this share of all is kept. Layers are compared by what a weight
    is of the squares that would be left in its layer (Lee and others, 2021): small and narrow layers keep more."""
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


def _sum_over_lanes(steps: LaneBatches, of_lane: Callable[[Any], Tensor]) -> Tensor:
    total: Tensor | None = None
    for lanes in steps:
        tree: TreeSum[Tensor] = TreeSum(len(lanes), torch.add)
        for lane, batch in enumerate(lanes):
            tree.push_lane(lane, None if batch is None else of_lane(batch))
        summed = tree.total()
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
    own = getattr(layer, "in_proj_weight" if isinstance(layer, nn.MultiheadAttention) else "weight", None)
    if not isinstance(own, Tensor) or own.dim() < 2:
        return torch.zeros(len(member.columns), dtype=torch.float64)
    weight = value(own).cpu()
    rows = (weight.transpose(0, 1) if member.is_input or isinstance(layer, nn.Embedding) else weight).flatten(1)
    each = rows.mean(1)[torch.tensor(member.columns)].mean(1)
    mean = float(each.mean())
    return each / mean if mean > 0 else each
