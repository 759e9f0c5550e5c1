"""An optimizer of parts is what the whole model's would be."""

import pytest
import torch
from torch import nn

from shoal.errors import ShoalError
from shoal.sharding.deferred_init import DeferredInit
from shoal.sharding.local_shards import register_by_path
from shoal.sharding.optimizer_factory import OptimizerFactory
from shoal.spec.job import ELEMENTWISE_OPTIMIZERS


def model():
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def part(*names):
    """Of some of its parameters, two rows or values."""
    root = nn.Module()
    for name in names:
        values = model().get_parameter(name).detach()[:2]
        register_by_path(root, name, nn.Parameter(values))
    return root


def by_dimensions(model, **more):
    biases = [p for p in model.parameters() if p.dim() == 1]
    matrices = [p for p in model.parameters() if p.dim() > 1]
    return torch.optim.AdamW([{"params": biases, "weight_decay": 0.0}, {"params": matrices}], lr=0.1, **more)


def test_parameters_are_numbered_as_in_a_single_process():
    whole = DeferredInit(model).model
    factory = OptimizerFactory(by_dimensions(whole), whole)
    assert factory.param_order == ["0.bias", "1.bias", "0.weight", "1.weight"]
    here = part("1.weight", "1.bias", "0.bias")
    for made in (factory.make_another(here), factory.rebind(here)):
        shapes = [[tuple(p.shape) for p in group["params"]] for group in made.param_groups]
        assert shapes == [[(2,), (2,)], [(2, 4)]]
        assert made.param_groups[0]["params"][1] is here.get_parameter("1.bias")
        assert [group["weight_decay"] for group in made.param_groups] == [0.0, 0.01]
    (nothing,) = (
        OptimizerFactory(torch.optim.SGD(whole.parameters(), lr=0.1), whole).make_another(nn.Module()).param_groups
    )
    assert (nothing["params"], nothing["lr"]) == ([], 0.1)


@pytest.mark.parametrize("name", ELEMENTWISE_OPTIMIZERS)
def test_every_kind_begins_as_one_that_is_made_of_the_parts(name):
    kind, here = getattr(torch.optim, name), part("0.weight", "1.bias")
    more = {"initial_accumulator_value": 0.5} if name == "Adagrad" else {"weight_decay": 0.1}
    whole = DeferredInit(model).model
    factory = OptimizerFactory(kind(whole.parameters(), lr=0.1, **more), whole)
    factory.make_another(nn.Module()).step()  # of a stretch where all is frozen
    made = factory.rebind(here)
    expected = kind(here.parameters(), lr=0.1, **more)
    assert made.state_dict()["param_groups"] == expected.state_dict()["param_groups"]
    for parameter in here.parameters():
        assert made.state[parameter].keys() == expected.state[parameter].keys()
        for key, value in made.state[parameter].items():
            assert torch.equal(value, expected.state[parameter][key])
            assert not value.is_meta


def test_what_somebody_does_at_each_step_is_done_to_all():
    calls = []
    whole, here = DeferredInit(model).model, part("0.weight")
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.1)
    optimizer.register_step_post_hook(lambda optimizer, *_: calls.append(optimizer))
    factory = OptimizerFactory(optimizer, whole)
    assert factory.rebind(here) is optimizer
    other = factory.make_another(here)
    optimizer.step()
    other.step()
    assert calls == [optimizer, other]


class Own(torch.optim.SGD):
    pass


def test_what_is_refused():
    whole = DeferredInit(model).model
    with pytest.raises(ShoalError, match="Own may need whole ones") as caught:
        OptimizerFactory(Own(whole.parameters()), whole)
    assert caught.value.code == "SH110"
    with pytest.raises(ShoalError, match="LBFGS"):
        OptimizerFactory(torch.optim.LBFGS(whole.parameters()), whole)
    with pytest.raises(ShoalError, match="none of the model's") as caught:
        OptimizerFactory(torch.optim.SGD([*whole.parameters(), nn.Parameter(torch.ones(1))]), whole)
    assert caught.value.code == "SH110"
