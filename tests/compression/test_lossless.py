"""What is removed with a proof changes no output, on any point of the box; what cannot be proven stays."""

import copy
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from shoal.compression.bounds import Bounds, module_bounds, propagate, trace
from shoal.compression.dependency import find_groups
from shoal.compression.lossless import cut_from_box, cut_from_samples, fold_step
from shoal.compression.shape import apply_steps, count_parameters, low_rank_step
from shoal.errors import ShoalError
from shoal.spec.compression.steps import CutStep, FoldStep, Kept, LowRankStep, RoundStep
from tests.compression.networks import Residual, Transformer, dense, randomise_norms

ROUNDING = 1e-9


def box(*shape, low=0.0, high=1.0):
    return Bounds(torch.full((1, *shape), low).double(), torch.full((1, *shape), high).double())


def points(bounds, count, seed=0):
    share = torch.rand((count, *bounds.low.shape[1:]), generator=torch.Generator().manual_seed(seed)).double()
    return bounds.low + share * (bounds.high - bounds.low)


def cut(model, bounds):
    """The model before and after, in float64, and what was found."""
    model = model.double().eval()
    steps = [step for step in [fold_step(model, (points(bounds, 2),))] if step]
    folded = apply_steps(copy.deepcopy(model), steps)
    found = cut_from_box(folded, bounds)
    return apply_steps(copy.deepcopy(model), [*steps, *([found.step] if found.step else [])]), found


@settings(max_examples=25)
@given(
    seed=st.integers(0, 2**31),
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    shift=st.floats(-2, 0.5),
    low=st.floats(-2, 1),
    zeroed=st.booleans(),
)
def test_random_networks_are_equal_in_the_box(seed, sizes, shift, low, zeroed):
    torch.manual_seed(seed)
    model = dense(4, *sizes, 3)
    with torch.no_grad():
        for layer in list(model)[:-1:2]:
            layer.bias += shift * torch.rand_like(layer.bias) * 3
            if zeroed:
                layer.weight *= (torch.rand(len(layer.weight), 1) > 0.3).float()
            if len(layer.weight) > 2:
                layer.weight[1], layer.bias[1] = layer.weight[0].clone(), layer.bias[0].clone()
    bounds = box(4, low=low, high=low + 1.5)
    small, found = cut(model, bounds)
    x = points(bounds, 200)
    assert (model(x) - small(x)).abs().max() < ROUNDING
    assert count_parameters(small) <= count_parameters(model)
    assert all(count < len(model.get_submodule(name).weight) for name, count in found.removed.items())


def test_the_bounds_hold_for_every_point():
    torch.manual_seed(1)
    model = randomise_norms(Residual()).double()
    graph, bounds = trace(model), box(1, 8, 8, low=-1.0)
    found = propagate(graph, bounds)
    assert not found.refused
    values = {}

    class Values(torch.fx.Interpreter):
        def run_node(self, n):
            values[n.name] = super().run_node(n)
            return values[n.name]

    Values(graph).run(points(bounds, 300))
    for name, one in found.found.items():
        assert (values[name] >= one.low).all(), name
        assert (values[name] <= one.high).all(), name


@settings(max_examples=60)
@given(seed=st.integers(0, 2**31), size=st.sampled_from([1.0, 1e5, 1e9]))
def test_the_bounds_hold_in_exact_arithmetic(seed, size):
    """Inputs that are large and hardly change, as times are, and a bias that takes them away: rounding is left."""
    random = torch.Generator().manual_seed(seed)
    layer = nn.Linear(8, 3).double()
    low = size * torch.rand(8, generator=random, dtype=torch.float64)
    high = low + 1e-3 * torch.rand(8, generator=random, dtype=torch.float64)
    with torch.no_grad():
        layer.weight[:] = torch.randn(3, 8, generator=random)
        layer.bias[:] = -layer.weight @ high
        found = module_bounds(layer, Bounds(low[None], high[None]))
    for row, bias, least, most in zip(layer.weight, layer.bias, found.low[0], found.high[0], strict=True):
        pairs = zip(row.tolist(), low.tolist(), high.tolist(), strict=True)
        ends = [(Fraction(w) * Fraction(a), Fraction(w) * Fraction(b)) for w, a, b in pairs]
        assert Fraction(least.item()) <= Fraction(bias.item()) + sum(map(min, ends))
        assert Fraction(most.item()) >= Fraction(bias.item()) + sum(map(max, ends))


def test_convolutions_with_batch_norm_lose_dead_and_constant_channels():
    torch.manual_seed(0)
    model = randomise_norms(Residual())
    with torch.no_grad():
        model.third.bias[:2] = -1000  # never active
        model.third.weight[3], model.third.bias[3] = 0, 0.3  # always the same
    small, found = cut(model, box(1, 8, 8))
    assert found.removed == {"third": 3}
    assert small.third.out_channels == 3
    assert small.head.in_features == 12
    assert isinstance(small.norm, nn.Identity)
    x = points(box(1, 8, 8), 100)
    assert (model(x) - small(x)).abs().max() < ROUNDING
    assert "combines it with another value" in found.refused["second"]


def test_a_constant_before_a_padded_convolution_stays():
    """Beside the border the padding is zero, and the constant is not."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3, padding=1))
    with torch.no_grad():
        model[0].weight[0], model[0].bias[0] = 0, 1.0
        model[0].weight[1], model[0].bias[1] = 0, -1.0
    small, found = cut(model, box(1, 6, 6))
    assert found.removed == {"0": 1}
    x = points(box(1, 6, 6), 50)
    assert (model(x) - small(x)).abs().max() < ROUNDING


def test_a_neuron_that_can_wake_up_is_not_proven_dead():
    model = dense(2, 3, 1)
    with torch.no_grad():
        model[0].weight[:] = 1.0
        model[0].bias[:] = torch.tensor([-3.0, -1.9, -2.1])
        model[0].weight[0, 0] = 2.0
    _, found = cut(model, box(2))  # largest sums: 0, 0.1, -0.1
    assert found.removed == {"0": 1}
    assert found.step.layers["0"].out == "0-1"


def test_dead_on_samples_is_another_class():
    """Equal on the samples, and not on every point of the box."""
    torch.manual_seed(0)
    model = dense(4, 16, 3).eval()
    with torch.no_grad():
        model[0].bias -= 0.6
    samples = torch.rand(20, 4)
    found = cut_from_samples(model, [samples[:7], samples[7:]])
    assert found.step == cut_from_samples(model, [samples[7:], samples[:7]]).step
    small = apply_steps(copy.deepcopy(model), [found.step])
    assert (model.double()(samples.double()) - small.double()(samples.double())).abs().max() < 1e-6
    proven = cut_from_box(model, box(4))
    assert sum(found.removed.values()) > sum(proven.removed.values())
    x = points(box(4, low=-3.0, high=3.0), 500)
    assert (model(x) - small(x)).abs().max() > 1e-3


@pytest.mark.parametrize("sizes", [(7, 5), (7, 7, 5), (7, 7)])
def test_values_whose_shape_depends_on_the_samples_are_left_out(sizes):
    """Time comes first here, so that a smaller last batch has another shape."""

    class TimeFirst(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.head = nn.Linear(4, 5), nn.Linear(5, 2)

        def forward(self, x):
            return self.head(torch.relu(self.layer(x.transpose(0, 1)))).mean(0)

    torch.manual_seed(0)
    model, batches = TimeFirst().eval(), [torch.rand(size, 3, 4) for size in sizes]
    with torch.no_grad():
        model.layer.bias[:] = torch.tensor([-100.0, -100.0, 9.0, 9.0, 9.0])
    found = cut_from_samples(model, batches)
    if len(set(sizes)) > 1:
        assert found.step is None
        assert found.refused["relu"] == "its shape changes with the number of samples"
    else:
        small = apply_steps(copy.deepcopy(model), [found.step])
        assert all(torch.allclose(small(x), model(x), atol=1e-6) for x in batches)


def test_shared_layers_and_unknown_operations_are_refused():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.head = nn.Linear(4, 4), nn.Linear(4, 2)

        def forward(self, x):
            return self.head(torch.relu(self.layer(torch.relu(self.layer(x)))))

    assert cut_from_box(Twice().double(), box(4)).step is None

    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.head = nn.Linear(4, 4), nn.Linear(4, 2)

        def forward(self, x):
            return self.head(torch.cumsum(self.layer(x), 1))

    found = cut_from_box(Odd().double(), box(4))
    assert found.step is None
    assert found.refused["layer"] == "cumsum reads it"
    assert "no bounds for cumsum" in found.refused["cumsum"]


def test_a_model_that_cannot_be_traced_is_told():
    with pytest.raises(ShoalError, match="cannot be traced"):
        fold_step(Transformer(), (torch.zeros(2, 8, dtype=torch.int64),))


class Joining(nn.Module):
    """Two layers side by side, joined by a function."""

    def __init__(self, join, inputs):
        super().__init__()
        self.join = join
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.hidden, self.head = nn.Linear(inputs, 6), nn.Linear(6, 2)

    def forward(self, x):
        x = self.join(torch.relu(self.first(x)), F.relu(input=self.second(input=x)))
        return self.head(torch.relu(self.hidden(x)))


@pytest.mark.parametrize(
    ("join", "inputs"),
    [
        (lambda a, b: torch.cat([a, b], 1), 8),
        (lambda a, b: torch.cat((a, b), dim=-1), 8),
        (lambda a, b: torch.stack([a, b], 1).flatten(1), 8),
        (lambda a, b: torch.stack([a, b], dim=-1).flatten(1), 8),
        (lambda a, b: a + b, 4),
        (lambda a, b: torch.add(1, b), 4),
    ],
    ids=["cat", "cat-last", "stack", "stack-last", "add", "shift"],
)
def test_values_that_are_joined_keep_their_bounds(join, inputs):
    torch.manual_seed(0)
    model = Joining(join, inputs)
    with torch.no_grad():
        model.hidden.bias[:] = torch.tensor([-100.0, -100.0, 9.0, 9.0, 9.0, 9.0])
    small, found = cut(model, box(4))
    assert found.removed == {"hidden": 2}
    x = points(box(4), 100)
    assert (model(x) - small(x)).abs().max() < ROUNDING


@pytest.mark.parametrize(
    ("join", "why"),
    [
        (lambda a, b: torch.cat([a, b]).chunk(2)[0], "there are no bounds for cat along the first dimension"),
        (lambda a, b: torch.stack([a, b]).sum(0), "there are no bounds for stack along the first dimension"),
        (lambda a, b: torch.cat([a, torch.ones(1, 4)], 1)[:, :4], "there are no bounds for cat with other tensors"),
        (lambda a, b: torch.where(a > 0, input=a, other=b), "there are no bounds for gt"),
        (lambda a, b: a.masked_fill(mask=b, value=0.0), "there are no bounds for masked_fill"),
        (lambda a, b: a.flatten(99), "there are no bounds for flatten: IndexError"),
        (lambda a, b: F.leaky_relu(a, -0.1) + b, "there are no bounds for a leaky_relu that falls"),
    ],
    ids=["cat", "stack", "constant", "where", "method", "failing", "leaky"],
)
def test_an_operation_without_a_rule_is_named_and_the_rest_goes_on(join, why):
    model = Joining(join, 4).double()
    with torch.no_grad():
        model.first.bias[0] = -100
    found = propagate(trace(model), box(4))
    assert any(text.startswith(why) for text in found.refused.values()), found.refused
    assert found.refused["head"] == "its input has no bounds"
    assert cut_from_box(model, box(4)).step is None


@pytest.mark.parametrize(
    "wrap",
    [
        parametrizations.weight_norm,
        parametrizations.spectral_norm,
        nn.utils.weight_norm,
        nn.utils.spectral_norm,
        lambda layer: apply_steps(nn.Sequential(layer), [RoundStep(layers={"0": 4})])[0],
    ],
    ids=["weight_norm", "spectral_norm", "old weight_norm", "old spectral_norm", "rounded"],
)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_layers_whose_weights_are_computed_stay(wrap):
    torch.manual_seed(0)
    model = nn.Sequential(
        wrap(nn.Linear(4, 6)), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 2)
    )
    with torch.no_grad():
        model[3].bias[:] = torch.tensor([-1e3, -1e3, 1e3, 1e3, 1e3, 1e3])
    model.eval()
    why = "its weight is computed from other parameters"
    assert fold_step(model, (torch.rand(2, 4),)) is None
    found = cut_from_box(model.double(), box(4))
    assert (found.removed, found.refused["0"]) == ({"3": 2}, why)
    x = points(box(4), 50)
    before = model(x)
    apply_steps(model, [found.step])
    assert (model(x) - before).abs().max() < ROUNDING
    groups = find_groups(model, (x[:2],))
    assert {one.name for one in groups.found} <= {"3"}
    assert groups.refused["0"] == why
    assert low_rank_step(model, 0.1)[1]["0"] == why
    for step in (CutStep(layers={"0": Kept(out="0-2")}), FoldStep(pairs=[("0", "1")]), LowRankStep(layers={"0": 1})):
        with pytest.raises(ShoalError, match=f"'0': {why}") as refused:
            apply_steps(model, [step])
        assert refused.value.code == "SH660"


def test_a_weight_that_the_code_reads_itself_stays():
    class Reading(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.head = nn.Linear(4, 6), nn.Linear(6, 2)

        def forward(self, x):
            return self.head(torch.relu(self.layer(x))) + self.layer.weight.sum()

    model = Reading()
    with torch.no_grad():
        model.layer.bias[:2] = -1000
    assert cut(model, box(4))[1].step is None


@pytest.mark.parametrize(("length", "folded"), [(6, False), (None, True)], ids=["sequence", "plain"])
def test_a_norm_that_acts_on_another_dimension_is_not_folded(length, folded):
    """A batch norm over sequences acts on the second dimension, a dense layer on the last; here they are as long."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2)).eval()
    with torch.no_grad():
        model[1].running_mean.uniform_(-1, 1)
        model[1].running_var.uniform_(0.3, 3)
    shape = (6, 4) if length else (4,)
    small, _ = cut(model, box(*shape))
    assert isinstance(small[1], nn.Identity) == folded
    x = points(box(*shape), 50)
    assert (model(x) - small(x)).abs().max() < ROUNDING


def test_an_activation_that_falls_is_no_rising_one():
    model = nn.Sequential(nn.Linear(1, 1), nn.LeakyReLU(-0.5), nn.Linear(1, 2), nn.ReLU(), nn.Linear(2, 1))
    with torch.no_grad():
        model[0].weight[:], model[0].bias[:] = 1, 0
        model[2].weight[:], model[2].bias[:] = torch.tensor([[-1.0], [1.0]]), torch.tensor([0.9, 0.1])
    small, found = cut(model, box(1, low=-3.0))
    assert "there are no bounds for a LeakyReLU" in found.refused.values()
    x = points(box(1, low=-3.0), 100)
    assert (model(x) - small(x)).abs().max() < ROUNDING
    rising = propagate(trace(nn.Sequential(nn.LeakyReLU(0.5), nn.ELU())), box(1, low=-3.0))
    assert not rising.refused
    assert propagate(trace(nn.Sequential(nn.ELU(alpha=-1.0))), box(1, low=-3.0)).refused


class Sums(nn.Module):
    def forward(self, x):
        return x + torch.relu(x), x + 0.1


@settings(max_examples=60)
@given(low=st.floats(0, 1e9), width=st.floats(1e-3, 1e9))
def test_sums_of_bounds_are_rounded_outwards(low, width):
    ends = low, low + width
    found = propagate(trace(Sums()), Bounds(*(torch.tensor([[end]], dtype=torch.float64) for end in ends))).found
    for bounds, exact in ((found["add"], Fraction), (found["add_1"], lambda end: Fraction(0.1))):
        least, most = (Fraction(end) + exact(end) for end in ends)
        assert Fraction(bounds.low.item()) <= least < most <= Fraction(bounds.high.item())
    one = torch.full((1, 1), low, dtype=torch.float64)
    same = propagate(trace(Sums()), Bounds(one, one)).found["add"]
    assert same.low == same.high == 2 * low


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**31), width=st.integers(2, 6), shift=st.floats(-4, 1), low=st.floats(-2, 1))
def test_random_residual_networks_with_norms_are_equal_in_the_box(seed, width, shift, low):
    torch.manual_seed(seed)
    model = randomise_norms(Residual(width))
    with torch.no_grad():
        for norm in (model.norm, model.second_norm):
            norm.bias.uniform_(-1, 1).add_(shift)
        model.third.bias += shift * torch.rand_like(model.third.bias) * 3
        model.third.weight *= (torch.rand(len(model.third.weight), 1, 1, 1) > 0.3).float()
    bounds = box(1, 8, 8, low=low, high=low + 1.5)
    small, _ = cut(model, bounds)
    assert isinstance(small.norm, nn.Identity)
    x = points(bounds, 100)
    assert (model(x) - small(x)).abs().max() < ROUNDING * max(1.0, model(x).abs().max().item())
