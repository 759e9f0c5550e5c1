"""Optimizers: parameter groups, torch's kernels against its plain one, and what is refused."""

import functools

import pytest
import torch
from torch import nn, optim

from shoal.errors import ShoalError
from shoal.spec.job import InitFromConfig, OptimizerConfig
from shoal.tasks.model import set_trainable
from shoal.tasks.optimizer import FUSED_CPU_DTYPES, build_optimizer, check_optimizer
from tests.tasks.test_model import net


def optimizer(model=None, **fields):
    spec = OptimizerConfig.model_validate({"name": "SGD", "args": {"lr": 0.1}} | fields)
    return build_optimizer(spec, model or net(), base_dir=".")


def sizes(made):
    return [len(group["params"]) for group in made.param_groups]


def test_the_first_group_that_matches_counts_and_the_rest_comes_first():
    groups = [{"match": "*.bias", "args": {"weight_decay": 0.0}}, {"match": "head", "args": {"lr": 0.5}}]
    made = optimizer(args={"lr": 0.1, "weight_decay": 0.01}, groups=groups)
    assert sizes(made) == [2, 3, 1]
    assert [(group["lr"], group["weight_decay"]) for group in made.param_groups] == [(0.1, 0.01), (0.1, 0), (0.5, 0.01)]


def test_groups_that_match_everything_leave_no_rest():
    assert sizes(optimizer(groups=[{"match": "*"}])) == [6]


def test_a_group_without_a_match_is_refused_by_its_number():
    with pytest.raises(ShoalError) as caught:
        optimizer(groups=[{"match": "head"}, {"match": "neck"}])
    assert (caught.value.code, caught.value.where) == ("SH405", "optimizer.groups.1")


def test_frozen_parameters_are_not_updated():
    model = net()
    set_trainable(model, InitFromConfig(freeze=["body"]))
    assert sizes(optimizer(model)) == [2]
    set_trainable(model, InitFromConfig(freeze=["head"]))
    with pytest.raises(ShoalError, match="every parameter is frozen") as caught:
        optimizer(model)
    assert caught.value.code == "SH404"


@pytest.mark.parametrize(
    ("name", "args", "fused"),
    [
        ("AdamW", {}, True),
        ("torch.optim:SGD", {}, True),
        ("SGD", {"foreach": True}, None),
        ("SGD", {"fused": False}, False),
        ("RMSprop", {}, None),
    ],
)
def test_fused_kernels_are_used_unless_the_job_says_otherwise(name, args, fused):
    assert optimizer(name=name, args={"lr": 0.1, **args}).defaults.get("fused") is fused


def test_an_optimizer_must_be_one_of_torch():
    with pytest.raises(ShoalError, match=r"is not a torch\.optim\.Optimizer") as caught:
        optimizer(name="torch.nn:Linear", args={})
    assert (caught.value.code, caught.value.where) == ("SH206", "optimizer")


# ---- kernels ----

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
STEPS = 5
KINDS = {
    "SGD": functools.partial(optim.SGD, lr=0.05),
    "SGD with decay": functools.partial(optim.SGD, lr=0.05, weight_decay=0.01),
    "SGD with momentum": functools.partial(optim.SGD, lr=0.05, momentum=0.5),
    "SGD with nesterov": functools.partial(optim.SGD, lr=0.05, momentum=0.5, nesterov=True),
    "Adam": functools.partial(optim.Adam, lr=0.05),
    "Adam with amsgrad": functools.partial(optim.Adam, lr=0.05, amsgrad=True),
    "AdamW": functools.partial(optim.AdamW, lr=0.05),
    "Adagrad": functools.partial(optim.Adagrad, lr=0.1),
    "RMSprop": functools.partial(optim.RMSprop, lr=0.02),
    "Adadelta": functools.partial(optim.Adadelta, lr=1.0, eps=1e-2),
    "Adamax": functools.partial(optim.Adamax, lr=0.05),
    "NAdam": functools.partial(optim.NAdam, lr=0.05),
    "RAdam": functools.partial(optim.RAdam, lr=0.05),
    "ASGD": functools.partial(optim.ASGD, lr=0.05),
    "Rprop": functools.partial(optim.Rprop, lr=0.05),
}
CASES = [
    (name, way)
    for name in KINDS
    for way in ("plain", "foreach", "fused")
    if way != "fused" or name.split()[0] in FUSED_CPU_DTYPES
]


def trained(name, way, dtype):
    """Parameters between 1 and 2 after a few steps, with gradients whose size is near 1 and whose sign is fixed."""
    generator = torch.Generator().manual_seed(3)
    found = []
    for shape in ((5,), (64,), (33, 7)):
        uniform = torch.rand(2 + STEPS, *shape, generator=generator, dtype=torch.float64)
        start, sign, *sizes = uniform.to(torch.bfloat16).to(dtype)  # the same numbers in every dtype
        parameter = nn.Parameter(start + 1)
        made = KINDS[name]([parameter], **({} if way == "plain" else {way: True}))
        for size in sizes:
            parameter.grad = (size / 2 + 0.5) * torch.where(sign < 0.5, -1, 1).to(dtype)
            made.step()
        found.append((start.double() + 1, parameter.detach().double()))
    return found


@functools.cache
def is_right(name, way, dtype):
    """Whether all parameters are where float64 with the plain kernel has them, up to two roundings per step."""
    precision = torch.float32 if name == "ASGD" and dtype is torch.float64 else dtype  # it keeps its rates so
    bound = 2 * STEPS * torch.finfo(precision).eps
    pairs = zip(trained(name, way, dtype), trained(name, "plain", torch.float64), strict=True)
    for (start, found), (_, exact) in pairs:
        assert float((exact - start).abs().min()) > 2 * STEPS * torch.finfo(torch.bfloat16).eps, (
            "the test tests nothing"
        )
        if not float((found - exact).abs().max()) <= bound:
            return False
    return True


@pytest.mark.parametrize(("name", "way"), CASES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_kernel_is_as_the_table_says(name, way, dtype):
    """A kernel that the table forbids and that is right fails too: then the table should allow it."""
    allowed = way != "fused" or dtype in FUSED_CPU_DTYPES[name.split()[0]]
    assert is_right(name, way, dtype) is allowed


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", sorted(FUSED_CPU_DTYPES))
def test_the_jobs_optimizer_gets_a_kernel_that_is_right(name, dtype):
    made = optimizer(net().to(dtype), name=name)
    assert made.defaults["fused"] is (dtype in FUSED_CPU_DTYPES[name])
    check_optimizer(made)


def test_one_parameter_of_16_bits_is_enough_for_the_plain_kernel():
    model = net()
    model["head"].to(torch.bfloat16)
    assert optimizer(model).defaults["fused"] is False
    assert optimizer(model, name="AdamW").defaults["fused"] is True


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "fields", [{"args": {"lr": 0.1, "fused": True}}, {"groups": [{"match": "head", "args": {"fused": True}}]}]
)
def test_a_wrong_kernel_that_the_user_asks_for_is_refused(fields, dtype):
    with pytest.raises(ShoalError, match=r"does not update b?float16 parameters") as caught:
        check_optimizer(optimizer(net().to(dtype), **fields))
    assert (caught.value.code, caught.value.where) == ("SH423", "optimizer")
    check_optimizer(optimizer(net(), **fields))


def test_an_optimizer_of_the_user_with_a_name_of_torchs_gets_no_kernel(tmp_path):
    own = "class SGD(torch.optim.SGD):\n    def __init__(self, params, lr):\n        super().__init__(params, lr)\n"
    (tmp_path / "own.py").write_text(f"import torch\n\n{own}")
    spec = OptimizerConfig.model_validate({"name": "own.py:SGD", "args": {"lr": 0.1}})
    assert build_optimizer(spec, net(), base_dir=str(tmp_path)).defaults["fused"] is None


# ---- refused ----


def test_an_optimizer_of_sparse_gradients_is_refused():
    with pytest.raises(ShoalError, match="only sparse gradients") as caught:
        check_optimizer(optim.SparseAdam(net().parameters()))
    assert caught.value.code == "SH420"
    assert "SparseTable" in caught.value.fix
