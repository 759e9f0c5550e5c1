"""The weights that a job starts from: which tensors of a file go to which tensors of the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from shoal.errors import ShoalError, error
from shoal.spec.job import InitFromConfig

MAX_NAMES = 2000
"""Names in each list of the event: a message of the control channel has a limit."""

Place = Callable[[str, Tensor], object]


def first_names(model: nn.Module) -> dict[str, str]:
    """Every name in the model's state dict, with the first name of its tensor: tied parameters have several names."""
    firsts: dict[int, str] = {}
    return {name: firsts.setdefault(id(value), name) for name, value in model.state_dict(keep_vars=True).items()}


@dataclass
class WeightMatch:
    """What a file gave to a model. `taken`: for the first name of each tensor of the model, the name under which it was
    found and the file's own name. `mismatched`: tensors whose shape in the file differs, with both shapes."""

    tensors: int
    taken: dict[str, tuple[str, str]] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    left_over: list[str] = field(default_factory=list)
    mismatched: dict[str, str] = field(default_factory=dict)

    def event_fields(self, path: str) -> dict[str, Any]:
        """The fields of the event `weights_loaded`."""
        return {
            "path": path,
            "loaded": len(self.taken),
            "tensors": self.tensors,
            "missing": self.missing[:MAX_NAMES],
            "missing_count": len(self.missing),
            "left_over": self.left_over[:MAX_NAMES],
            "left_over_count": len(self.left_over),
            "mismatched": list(self.mismatched.values())[:MAX_NAMES],
            "mismatched_count": len(self.mismatched),
        }


def match_weights(
    shapes: Mapping[str, Sequence[int]],
    firsts: Mapping[str, str],
    weights: Mapping[str, Tensor],
    init: InitFromConfig,
    *,
    place: Place,
) -> WeightMatch:
    """Call `place` with the model's name and the values of every tensor of the file that fits the model.

    `shapes` and `firsts` are by the names of the model's state dict. Tied names are one tensor, which any of them
    completes. SH406 if a tensor does not fit and `init.strict` is set, or if none fits.
    """
    found = WeightMatch(len(set(firsts.values())))
    order = {name: position for position, name in enumerate(firsts)}
    names: dict[str, str] = {}
    for own_name in weights:
        name = rename_prefix(own_name, init.rename)
        if name in names:
            message = f"'{names[name]}' and '{own_name}' of the file are both '{name}' after `rename`"
            raise error("SH406", message, where=f"init_from {init.path}", fix="Correct `init_from.rename`.")
        names[name] = own_name
        values = weights[own_name]
        if name not in firsts:
            found.left_over.append(name)
        elif tuple(shapes[name]) != tuple(values.shape):
            found.mismatched[name] = (
                f"'{name}' is {list(values.shape)} in the file and {list(shapes[name])} in the model"
            )
        elif _is_newer(found, name, values, weights, firsts, order):
            place(name, values)
            found.taken[firsts[name]] = (name, own_name)
    found.missing = sorted(set(firsts.values()) - found.taken.keys() - {firsts[name] for name in found.mismatched})
    found.left_over.sort()
    if failure := _refusal(found, init):
        raise failure
    return found


def _is_newer(
    found: WeightMatch,
    name: str,
    values: Tensor,
    weights: Mapping[str, Tensor],
    firsts: Mapping[str, str],
    order: Mapping[str, int],
) -> bool:
    """Whether the tensor is to be placed. Of several names of a tied tensor the last in the model counts; another one
    with other values is left over."""
    if firsts[name] not in found.taken:
        return True
    other, other_in_file = found.taken[firsts[name]]
    if _same_bits(values, weights[other_in_file]):
        return False
    is_last = order[name] > order[other]
    found.left_over.append(other if is_last else name)
    return is_last


def _same_bits(one: Tensor, other: Tensor) -> bool:
    same = one.dtype == other.dtype and one.shape == other.shape
    return same and torch.equal(*(t.contiguous().reshape(-1).view(torch.uint8) for t in (one, other)))


def _refusal(found: WeightMatch, init: InitFromConfig) -> ShoalError | None:
    where = f"init_from {init.path}"
    if not found.taken:
        return error("SH406", "none of the file's tensors fits the model", where=where)
    if not init.strict or not (found.missing or found.left_over or found.mismatched):
        return None
    if found.mismatched:
        what = next(iter(found.mismatched.values()))
    else:
        what = f"the {'file' if found.missing else 'model'} has no '{(found.missing or found.left_over)[0]}'"
    counts = f"{len(found.missing)} missing, {len(found.left_over)} left over, {len(found.mismatched)} of another shape"
    return error("SH406", f"{what} ({counts})", where=where)


def rename_prefix(name: str, prefixes: Mapping[str, str]) -> str:
    for old, new in prefixes.items():
        if name.startswith(old):
            return new + name[len(old) :]
    return name
