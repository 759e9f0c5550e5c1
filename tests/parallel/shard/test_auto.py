"""`cuts: auto`: everybody cuts alike, into stretches of similar cost."""

import pytest
import torch
from torch import nn

from shoal.errors import ShoalError
from shoal.parallel.shard.auto import auto_cuts, seconds, size_bytes, watched
from shoal.parallel.shard.stages import units
from tests.parallel.shard.crew import MODELS, batch, crew, loss


def on_meta(name):
    with torch.device("meta"):
        return MODELS[name]()


def test_all_members_cut_alike_and_no_stretch_has_nearly_all():
    def act(grid):
        model = on_meta("gpt")
        cuts, seen = auto_cuts(model, grid, loss, batch("gpt", 0, 0))
        held = seen.stages_of(cuts)
        sizes = [sum(model.get_parameter(n).numel() for n, s in held.items() if stage in s) for stage in range(2)]
        return cuts, sizes

    (cuts, sizes), other = crew(2, act)
    assert other[0] == cuts
    assert cuts[0] in ("blocks.1", "blocks.2")
    assert min(sizes) > 0.25 * sum(sizes)


def test_what_stretches_hold_and_take():
    model = on_meta("tied")
    calls = {}
    seen = watched(model, loss, batch("tied", 0, 0), calls)
    names = units(model, seen)
    sizes = size_bytes(model, seen, names)
    shared = model.tokens.weight.nbytes
    assert sum(sizes) == sum(p.nbytes for p in model.parameters()) + shared
    assert sizes[-1] == shared
    times = seconds(model, names, calls)
    assert times[0] == times[1]  # blocks alike
    assert all(time > 0 for time in times)


def test_a_model_without_blocks_cannot_be_cut():
    def act(grid):
        with pytest.raises(ShoalError, match="places to cut") as caught, torch.device("meta"):
            auto_cuts(nn.Linear(12, 34), grid, loss, batch("mlp", 0, 0))
        return caught.value.code

    assert crew(2, act) == ["SH405", "SH405"]
