"""`cuts: auto`: everybody cuts alike, into stretches of similar cost."""

import pytest
import torch
from torch import nn

from shoal.errors import ShoalError
from shoal.sharding.build_model import auto_split_points, forward_seconds, stage_bytes, trace_with_inputs
from shoal.sharding.pipeline_schedule import split_candidates
from tests.sharding.ranks import MODELS, batch, loss, run_ranks


def on_meta(name):
    with torch.device("meta"):
        return MODELS[name]()


def test_all_ranks_split_alike_and_no_stage_has_nearly_all():
    def act(mesh):
        model = on_meta("gpt")
        cuts, trace = auto_split_points(model, mesh, loss, batch("gpt", 0, 0))
        held = trace.stages_of(cuts)
        sizes = [sum(model.get_parameter(n).numel() for n, s in held.items() if stage in s) for stage in range(2)]
        return cuts, sizes

    (cuts, sizes), other = run_ranks(2, act)
    assert other[0] == cuts
    assert cuts[0] in ("blocks.1", "blocks.2")
    assert min(sizes) > 0.25 * sum(sizes)


def test_bytes_and_cost_of_stages():
    model = on_meta("tied")
    calls = {}
    trace = trace_with_inputs(model, loss, batch("tied", 0, 0), calls)
    names = split_candidates(model, trace)
    sizes = stage_bytes(model, trace, names)
    shared = model.tokens.weight.nbytes
    assert sum(sizes) == sum(p.nbytes for p in model.parameters()) + shared
    assert sizes[-1] == shared
    times = forward_seconds(model, names, calls)
    assert times[0] == times[1]  # blocks alike
    assert all(time > 0 for time in times)


def test_a_model_without_blocks_cannot_be_split():
    def act(mesh):
        with pytest.raises(ShoalError, match="places to cut") as caught, torch.device("meta"):
            auto_split_points(nn.Linear(12, 34), mesh, loss, batch("mlp", 0, 0))
        return caught.value.code

    assert run_ranks(2, act) == ["SH405", "SH405"]
