"""Steps change the shape of a model; a step that does not fit is refused."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import nn

from shoal.compression.dependency import find_groups
from shoal.compression.groups import Group, GroupMember
from shoal.compression.importance import (
    by_magnitude,
    by_taylor,
    by_zeros,
    cut_least,
    join_sums,
    share_of_layers,
    sum_of_some_lanes,
)
from shoal.compression.lossless import fold_step
from shoal.compression.shape import apply_steps, count_parameters, low_rank_step, plain_state
from shoal.errors import ShoalError
from shoal.spec.compression.steps import (
    CutStep,
    Kept,
    LowRankStep,
    MaskStep,
    RoundStep,
    ShareStep,
    format_indices,
    parse_indices,
)
from tests.compression.networks import LeNet5, Residual, ResNet, dense, randomise_norms

pruning = pytest.importorskip("torch_pruning", reason="the extra compress is not installed")


@given(st.sets(st.integers(0, 300), min_size=1))
def test_indices_as_text_and_back(indices):
    assert parse_indices(format_indices(sorted(indices))) == sorted(indices)


@pytest.mark.parametrize("text", ["", "3,2", "1-1", "2-1", "0,0", "1,,2", "-1", "a", "0-99999999999"])
def test_other_texts_are_no_indices(text):
    with pytest.raises(ValidationError):
        Kept(out=text)


@pytest.mark.parametrize(
    ("name", "kept", "why"),
    [
        ("9", Kept(out="0"), "no such layer"),
        ("0", Kept(out="5"), "has no 5"),
        ("2", Kept(inputs="0-7"), "has no 7"),
        ("1", Kept(out="0"), "a ReLU cannot be cut"),
    ],
)
def test_a_step_that_does_not_fit_is_refused(name, kept, why):
    with pytest.raises(ShoalError, match=why) as refused:
        apply_steps(dense(4, 5, 3), [CutStep(layers={name: kept})])
    assert refused.value.code == "SH660"


def groups_of(model, x):
    found = find_groups(model, (x,))
    return {one.name: {(m.layer, m.is_input) for m in one.members} for one in found.found}, found


def test_channels_of_a_residual_go_together():
    x = torch.rand(2, 1, 8, 8)
    members, found = groups_of(Residual(), x)
    assert members["third"] == {("third", False), ("head", True)}
    assert {("first", False), ("second", False), ("norm", False), ("third", True)} <= members["first"]
    assert found.refused == {"head": "it is an output of the model"}
    assert next(g for g in found.found if g.name == "third").members[1].columns[1] == (4, 5, 6, 7)


@pytest.mark.parametrize("score", ["magnitude", "taylor", "zeros"])
@pytest.mark.parametrize(
    ("model", "x"),
    [(dense(8, 6, 4, 3), torch.rand(4, 8)), (Residual(), torch.rand(4, 1, 8, 8))],
    ids=["dense", "convolutions"],
)
def test_a_pruned_model_runs_and_is_smaller(model, x, score):
    model = randomise_norms(copy.deepcopy(model))
    groups = find_groups(model, (x,)).found
    steps = [[x[:2], x[2:]], [x, None]]
    if score == "magnitude":
        scores = by_magnitude(model, groups)
    elif score == "taylor":
        scores = by_taylor(model, groups, steps, lambda batch: model(batch).square().mean())
    else:
        scores = by_zeros(model, groups, steps, model)
    cut = cut_least(groups, scores, remove=0.5)
    small = apply_steps(copy.deepcopy(model), [cut])
    assert small(x).shape == model(x).shape
    assert count_parameters(small) < 0.6 * count_parameters(model)
    again = apply_steps(copy.deepcopy(model), [cut])
    again.load_state_dict(small.state_dict())
    assert torch.equal(again(x), small(x))


@pytest.mark.parametrize("layer", [nn.Conv2d(1, 3, 1), nn.Linear(4, 3)], ids=["convolution", "dense"])
def test_a_channel_that_its_batch_norm_silences_is_never_active(layer):
    """What the layer itself gives is positive for every channel."""
    is_conv = isinstance(layer, nn.Conv2d)
    norm, rest = (nn.BatchNorm2d(3), nn.Conv2d(3, 2, 1)) if is_conv else (nn.BatchNorm1d(3), nn.Linear(3, 2))
    model = nn.Sequential(copy.deepcopy(layer), norm, nn.ReLU(), rest).eval()
    with torch.no_grad():
        model[0].weight.abs_()
        model[0].bias[:] = 1.0
        norm.running_mean[1] = 100.0
    x = torch.rand(6, 1, 2, 2) if is_conv else torch.rand(6, 4)
    groups = find_groups(model, (x,)).found
    (scores,) = by_zeros(model, groups, [[x[:2], x[2:]]], model)
    assert scores.tolist() == [2.0, 0.0, 2.0]
    assert cut_least(groups, [scores], remove=0.34).layers["0"].out == "0,2"


@given(st.integers(1, 9), st.integers(0, 2**9 - 1), st.integers(0, 2**9 - 1), st.integers(0, 2**31))
def test_a_sum_over_lanes_has_the_same_bits_for_every_division_of_them(lanes, division, empty, seed):
    values = torch.rand(lanes, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    batches = {lane: None if empty >> lane & 1 else values[lane] for lane in range(lanes)}
    owners = [[lane for lane in range(lanes) if (division >> lane & 1) == side] for side in (0, 1)]

    def part(own):
        return own, sum_of_some_lanes({lane: batches[lane] for lane in own}, lanes, lambda row: row.clone())

    alone = join_sums([part(range(lanes))], lanes)
    several = join_sums([part(own) for own in owners], lanes)
    assert (alone is None and several is None) or torch.equal(alone, several)


def test_small_layers_keep_more_of_their_weights():
    """As many as asked for in all; of a layer, the largest ones."""
    torch.manual_seed(0)
    weights = {"large": torch.randn(200, 300), "small": torch.randn(20, 30), "dead": torch.zeros(5, 5)}
    kept = share_of_layers(weights, 0.1)
    assert abs(sum(kept[n] * w.numel() for n, w in weights.items()) - 0.1 * 60_625) <= 1
    assert kept["small"] > 3 * kept["large"]
    assert kept["dead"] == 1 / 25
    assert share_of_layers(weights, 0.1) == kept


@pytest.mark.parametrize("folded", [False, True], ids=["norms", "folded"])
@pytest.mark.parametrize("make", [ResNet, LeNet5])
def test_a_pruned_network_is_the_one_whose_layers_ignore_the_removed_channels(make, folded):
    torch.manual_seed(0)
    model, x = randomise_norms(make()).double(), torch.rand(3, 1, 28, 28, dtype=torch.float64)
    if folded and (fold := fold_step(model, (x,))):
        before = model(x)
        apply_steps(model, [fold])
        assert not any(isinstance(one, nn.BatchNorm2d) for one in model.modules())
        assert torch.allclose(model(x), before, rtol=1e-9)
    groups = find_groups(model, (x,))
    assert list(groups.refused.values()) == ["it is an output of the model"]
    cut = cut_least(groups.found, by_magnitude(model, groups.found), remove=0.5)
    small = apply_steps(copy.deepcopy(model), [cut])
    with torch.no_grad():
        for name, kept in cut.layers.items():
            if kept.inputs:
                weight = model.get_submodule(name).weight
                gone = sorted(set(range(weight.shape[1])) - set(parse_indices(kept.inputs)))
                weight[:, gone] = 0
    assert torch.allclose(small(x), model(x), rtol=1e-9)


def test_the_channel_with_the_smallest_weights_goes():
    model = dense(8, 4, 3)
    with torch.no_grad():
        model[0].weight[2] *= 0.01
        model[2].weight[:, 2] *= 0.01
    groups = find_groups(model, (torch.rand(2, 8),)).found
    assert cut_least(groups, by_magnitude(model, groups), remove=0.25).layers["0"].out == "0-1,3"


def test_low_rank_is_the_best_approximation():
    model = dense(12, 10)
    whole = model[0].weight.detach().clone()
    apply_steps(model, [LowRankStep(layers={"0": 3})])
    product = model[0][1].weight @ model[0][0].weight
    assert torch.equal(model[0].weight, product)
    assert model[0].bias is model[0][1].bias
    assert torch.linalg.matrix_rank(product) == 3
    rest = torch.linalg.svdvals(whole)[3:]
    assert torch.allclose((whole - product).norm(), rest.norm(), rtol=1e-4)
    with pytest.raises(ShoalError, match="rank 11"):
        apply_steps(dense(12, 10), [LowRankStep(layers={"0": 11})])
    with pytest.raises(ShoalError, match="a Product has no weight"):
        apply_steps(model, [MaskStep(layers=["0"])])


def test_layers_become_products_where_that_has_fewer_weights():
    step, refused = low_rank_step(dense(12, 10, 2), 0.25)
    assert (step.layers, refused) == ({"0": 2, "2": 1}, {})
    assert low_rank_step(dense(2, 2), 0.5) == (None, {})
    tied = nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 20))
    tied[1].weight = tied[0].weight
    assert low_rank_step(tied, 0.25) == (None, {"1": "another layer has the same weight"})
    twice = nn.Linear(8, 8)
    assert low_rank_step(nn.Sequential(twice, twice), 0.25) == (None, {"0": "another layer has the same weight"})


@pytest.mark.parametrize(
    "step",
    [MaskStep(layers=["0"]), RoundStep(layers={"0": 3}), ShareStep(layers={"0": 2})],
    ids=["mask", "round", "share"],
)
def test_restricted_weights_train_within_their_restriction(step):
    torch.manual_seed(0)
    model = dense(6, 5, 2)
    with torch.no_grad():
        model[0].weight[:, :2] = 0
    apply_steps(model, [step])
    start = model[0].weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    x = torch.rand(16, 6)
    for _ in range(3):
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()
    state = plain_state(model, step.layers)
    assert set(state) == set(dense(6, 5, 2).state_dict())
    weight = state["0.weight"]
    assert not torch.equal(weight, start)
    if isinstance(step, MaskStep):
        assert (weight[:, :2] == 0).all()
        assert (weight[:, 2:] != 0).any()
    elif isinstance(step, RoundStep):
        assert max(len(row.unique()) for row in weight) <= 7
    else:
        assert len(weight.unique()) <= 4
        assert (weight[:, :2] == 0).all()


@pytest.mark.parametrize(("keep", "channels", "left"), [(0.9, 10, 9), (0.7, 20, 14), (0.6, 5, 3), (0.5, 5, 3)])
def test_a_share_is_what_it_says(keep, channels, left):
    """1 - 0.9 is less than 0.1 in floating-point numbers. What cannot be divided stays."""
    group = Group("0", channels, (GroupMember("0", False, tuple((i,) for i in range(channels))),))
    cut = cut_least([group], [list(range(channels))], remove=1 - keep)
    assert len(parse_indices(cut.layers["0"].out)) == left


def test_a_depthwise_convolution_is_cut_on_both_sides():
    model = nn.Sequential(nn.Conv2d(1, 4, 1), nn.Conv2d(4, 4, 3, groups=4), nn.Conv2d(4, 2, 1))
    kept = {"0": Kept(out="0,2"), "1": Kept(out="0,2"), "2": Kept(inputs="0,2")}
    small = apply_steps(copy.deepcopy(model), [CutStep(layers=kept)])
    assert small[1].groups == 2
    assert small(torch.rand(1, 1, 5, 5)).shape == (1, 2, 3, 3)
