"""How measurements are repeated, and what a profile says of a job that needs no clock."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import ShoalError
from shoal.spec.load import make_job
from shoal.train import profile
from shoal.train.build import build
from tests.conftest import MLP

CPU = torch.device("cpu")


class Work:
    """Work whose runs take these seconds on its own clock; the last number repeats."""

    def __init__(self, *seconds):
        self.seconds, self.runs, self.now_s, self.prepared = seconds, 0, 0.0, 0

    def __call__(self):
        self.now_s += self.seconds[min(self.runs, len(self.seconds) - 1)]
        self.runs += 1

    def prepare(self):
        self.prepared += 1
        self.now_s += 100.0

    def typical(self, **options):
        return profile._typical_seconds(self, CPU, clock=lambda: self.now_s, **options)


@pytest.fixture
def built(job_dir):
    def go(**changes):
        job = make_job(MLP | changes, base_dir=str(job_dir))
        return build(job, cache_dir=job_dir, report=lambda kind, **fields: None)

    return go


# ---- repeating ----


@pytest.mark.parametrize(
    ("seconds", "runs"),
    [((2.0,), 1), ((0.5,), 1 + 3), ((0.0625,), 1 + 4), ((0.0,), 1 + 50)],
)
def test_how_often_work_is_repeated(seconds, runs):
    work = Work(*seconds)
    assert work.typical(budget_s=0.25) == seconds[0]
    assert work.runs == runs


def test_the_warm_up_does_not_count():
    assert Work(0.75, 0.25).typical() == 0.25


def test_preparation_is_not_timed_and_comes_before_each_run():
    work = Work(0.125)
    assert work.typical(before=work.prepare) == 0.125
    assert work.prepared == work.runs - 1


@given(st.lists(st.integers(1, 64), min_size=4, max_size=12))
def test_a_typical_time_is_one_that_was_measured(eighths):
    seconds = [n / 64 for n in eighths]
    assert Work(*seconds).typical(budget_s=0.0) in seconds[1:4]


# ---- memory ----


def test_a_model_larger_than_the_memory_is_refused_before_it_is_built(job_dir):
    model = {"name": "torch.nn:Linear", "args": {"in_features": 1 << 24, "out_features": 1 << 24}}
    job = make_job(MLP | {"model": model}, base_dir=str(job_dir))
    with pytest.raises(ShoalError, match=r"needs 2251799\.\d GB at least, the machine has") as caught:
        profile._check_memory(job)
    assert (caught.value.code, caught.value.where) == ("SH407", "model")


@pytest.mark.parametrize("inputs", [64, "a word"], ids=["small", "not buildable"])
def test_other_models_are_left_to_the_build(job_dir, inputs):
    model = {"name": "models.py:mlp", "args": {"inputs": inputs, "classes": 10}}
    profile._check_memory(make_job(MLP | {"model": model}, base_dir=str(job_dir)))


# ---- what rules a choice out ----


def test_a_plain_job_may_choose_everything(built):
    made = built()
    assert profile._why_no_codecs(made.replica) == ""
    assert profile._why_no_servers(made.replica) == ""
    assert profile._why_no_shards(made.job, made.replica) == ""


def test_codecs_need_float32(built):
    made = built()
    made.replica.trainable[0].data = made.replica.trainable[0].data.double()
    assert profile._why_no_codecs(made.replica) == "codecs take float32 gradients, and some are float64"


def test_servers_need_an_optimizer_that_treats_each_element_alone(built):
    made = built(optimizer={"name": "models.py:TrustRatioSGD", "args": {"lr": 0.1}})
    assert "TrustRatioSGD may need whole ones" in profile._why_no_servers(made.replica)


def test_shards_are_not_encoded(built):
    made = built(codec={"kind": "int8"})
    assert profile._why_no_shards(made.job, made.replica).endswith("not by int8")


def test_fragments_share_all_parameters(built):
    shares = profile._fragment_shares(built().replica)
    assert sum(shares) == pytest.approx(1.0)
    assert min(shares) > 0


def test_a_full_step_allocates_the_optimizers_state(built):
    made = built()
    assert list(profile._optimizer_tensors(made.replica)) == []
    profile._full_step(made, made.example)
    held = sum(t.numel() for t in profile._optimizer_tensors(made.replica))
    assert held == sum(p.numel() for p in made.replica.trainable)
