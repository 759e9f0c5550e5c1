"""Removes units of a recurrent layer (torch.nn.RNNBase) of one layer and one direction."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def unit_rows(layer: Any, units: list[int]) -> list[int]:
    """The rows of the layer's matrices that belong to these units: one for each gate."""
    gates = len(layer.weight_ih_l0) // layer.hidden_size
    return [gate * layer.hidden_size + unit for gate in range(gates) for unit in units]


def cut_units(layer: Any, units: list[int]) -> None:
    """Keep these units, in place."""
    rows = unit_rows(layer, units)
    for name, old in list(layer.named_parameters(recurse=False)):
        new = old.detach()[rows]
        new = new[:, units] if name == "weight_hh_l0" else new
        setattr(layer, name, nn.Parameter(new.clone(), requires_grad=old.requires_grad))
    layer.hidden_size = len(units)


def ignore_unit(layer: Any, units: list[int]) -> None:
    """Other units do not read these ones any more."""
    with torch.no_grad():
        layer.weight_hh_l0[:, units] = 0


def rows_by_unit(layer: Any, values: Tensor) -> Tensor:
    """Values of the input matrix, with one row per unit."""
    return values.reshape(-1, layer.hidden_size, values.shape[1]).transpose(0, 1).flatten(1)
