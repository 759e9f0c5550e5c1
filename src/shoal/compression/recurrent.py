"""Units of recurrent layers: each one with its gates, the weights that other units read it by, and the inputs of the
dense layer after it."""

from __future__ import annotations

from typing import Any

from torch import nn

from shoal.compression.attention import NOISE, OutputProbe, check_groups
from shoal.compression.groups import Group, GroupMember


def find_recurrent_groups(model: nn.Module, inputs: tuple[Any, ...]) -> tuple[list[Group], dict[str, str]]:
    """The units of every recurrent layer of one layer and one direction, and why others cannot be cut."""
    found, refused = [], {}
    for name, layer in model.named_modules():
        if not isinstance(layer, nn.RNNBase):
            continue
        if layer.num_layers > 1 or layer.bidirectional or layer.proj_size:
            refused[name] = "a recurrent layer of several layers or directions, or with a projection, is not pruned"
        elif (group := _group(model, inputs, name, layer)) is None:
            refused[name] = "the outputs of this recurrent layer are not read by one dense layer alone"
        else:
            found.append(group)
    fit, unfit = check_groups(model, inputs, found)
    return fit, refused | unfit


def _group(model: nn.Module, inputs: tuple[Any, ...], name: str, layer: nn.RNNBase) -> Group | None:
    probe = _UnitProbe(model, name, layer.hidden_size)
    sets = probe.run(inputs)
    reader: Any = model.get_submodule(probe.reader) if sets and probe.reader else None
    if sets is None or type(reader) is not nn.Linear:
        return None
    columns = [tuple(sorted(one)) for one in sets]
    is_whole = sorted(i for one in columns for i in one) == list(range(reader.in_features))
    if not is_whole or len({len(one) for one in columns}) > 1:
        return None
    units = tuple((unit,) for unit in range(layer.hidden_size))
    members = (GroupMember(name, False, units), GroupMember(probe.reader, True, tuple(columns)))
    return Group(name, layer.hidden_size, members, kind="recurrent")


class _UnitProbe(OutputProbe):
    """A recurrent layer returns its outputs, and the state after the last of them."""

    def _disturb(self, module: Any, args: Any, output: Any) -> Any:
        outputs, state = output
        last = state[0] if isinstance(state, tuple) else state
        outputs, last = outputs.clone(), last.clone()
        for sample, unit in enumerate(self._rows, start=len(self._rows)):
            outputs.select(0 if module.batch_first else 1, sample)[..., unit] += NOISE
            last.select(1, sample)[..., unit] += NOISE
        return outputs, ((last, *state[1:]) if isinstance(state, tuple) else last)
