"""Where a model is cut, and what each stage does when: pure functions."""

from itertools import combinations, pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from shoal.checkpoint.slices import TensorSlice
from shoal.errors import ShoalError
from shoal.sharding.pipeline_schedule import (
    balanced_partition,
    split_candidates,
    stage_schedule,
    trace_forward,
    unit_costs,
)
from tests.sharding.ranks import MODELS, batch, loss


@given(st.sampled_from(["gpipe", "1f1b"]), st.integers(1, 6), st.integers(1, 9))
def test_every_schedule_runs_to_its_end(schedule, stages, microbatches):
    """Each stage does each microbatch once forth and once back, and nobody waits for ever."""
    todo = [stage_schedule(schedule, stage=s, stages=stages, microbatches=microbatches) for s in range(stages)]
    for acts in todo:
        assert sorted(acts) == sorted((verb, i) for verb in ("forward", "backward") for i in range(microbatches))
        assert [i for verb, i in acts if verb == "backward"] == list(range(microbatches))
    done = set()
    while any(todo):
        ready = [s for s, acts in enumerate(todo) if acts and _may(acts[0], s, stages, done)]
        assert ready, todo
        for stage in ready:
            done.add((stage, *todo[stage].pop(0)))


def _may(act, stage, stages, done):
    verb, i = act
    if verb == "forward":
        return stage == 0 or (stage - 1, "forward", i) in done
    return (stage, "forward", i) in done and (stage == stages - 1 or (stage + 1, "backward", i) in done)


def test_fewer_microbatches_are_under_way_in_1f1b():
    def most(schedule):
        under_way = [0]
        for verb, _ in stage_schedule(schedule, stage=1, stages=3, microbatches=8):
            under_way.append(under_way[-1] + (1 if verb == "forward" else -1))
        return max(under_way)

    assert (most("gpipe"), most("1f1b")) == (8, 2)


@given(st.lists(st.integers(0, 20), min_size=1, max_size=7), st.integers(1, 4))
def test_the_costliest_stage_costs_least(costs, ways):
    if ways > len(costs):
        return
    cuts = balanced_partition(costs, ways)
    assert cuts == sorted(set(cuts))
    assert len(cuts) == ways - 1
    assert _worst(costs, cuts) == min(_worst(costs, tried) for tried in _all_cuts(len(costs), ways))


def _all_cuts(count, ways):
    return combinations(range(1, count), ways - 1)


def _worst(costs, cuts):
    edges = [0, *cuts, len(costs)]
    return max(sum(costs[a:b]) for a, b in pairwise(edges))


def test_memory_and_time_count_alike():
    assert unit_costs([1, 3], [3.0, 1.0]) == [1.0, 1.0]
    assert unit_costs([0, 0], [0.0, 0.0]) == [0.0, 0.0]


def watched(name):
    with torch.device("meta"):
        model = MODELS[name]()
    return model, trace_forward(model, lambda: loss(model, batch(name, 0, 0)))


def test_who_uses_what():
    model, trace = watched("tied")
    assert split_candidates(model, trace) == ["blocks.0", "blocks.1", "norm", "head"]
    stages = trace.stages_of(["blocks.1", "norm"])
    assert stages["tokens.weight"] == [0, 2]
    assert stages["places.weight"] == [0]
    assert {n for n, s in stages.items() if s == [1]} == {n for n in stages if n.startswith("blocks.1.")}
    assert stages["norm.bias"] == [2]
    assert stages.keys() == dict(model.named_parameters()).keys()


def test_buffers_go_with_who_uses_them_and_the_rest_stays():
    _, trace = watched("batch_normed")
    stages = trace.stages_of(["4"])
    assert (stages["1.running_mean"], stages["6.bias"], stages["constant"]) == ([0], [1], [0])


@pytest.mark.parametrize(
    ("cuts", "code", "words"),
    [
        (["blocks.9"], "SH405", "blocks"),
        (["blocks.2", "blocks.1"], "SH107", "order"),
        (["norm", "norm"], "SH107", "order"),
    ],
)
def test_invalid_split_points(cuts, code, words):
    _, trace = watched("gpt")
    with pytest.raises(ShoalError) as caught:
        trace.stages_of(cuts)
    assert caught.value.code == code
    assert words in f"{caught.value}"


def test_a_module_that_is_entered_twice_is_no_split_point():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(12, 12)

        def forward(self, x):
            return self.inner(self.inner(x))

    model = Twice().to("meta")
    with pytest.raises(ShoalError, match="2 times"):
        trace_forward(model, lambda: model(torch.zeros(2, 12))).stages_of(["inner"])


@given(st.data())
def test_boxes_that_overlap_share_what_both_have(data):
    shape = data.draw(st.lists(st.integers(1, 5), max_size=3))

    def tensor_slice():
        start = [data.draw(st.integers(0, n - 1)) for n in shape]
        return TensorSlice(
            tuple(shape),
            tuple(start),
            tuple(data.draw(st.integers(1, n - a)) for n, a in zip(shape, start, strict=True)),
        )

    one, other = tensor_slice(), tensor_slice()
    whole = torch.arange(max(TensorSlice.full(shape).view_of(torch.empty(shape)).numel(), 1)).reshape(shape)
    both = set(one.view_of(whole).flatten().tolist()) & set(other.view_of(whole).flatten().tolist())
    common = one.overlap(other)
    assert (common is None) == (not both)
    if common:
        here, there = common
        assert torch.equal(one.view_of(whole)[here], other.view_of(whole)[there])
        assert set(one.view_of(whole)[here].flatten().tolist()) == both
