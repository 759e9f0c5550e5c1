"""Optimizers and loops.

The same bits on 1 and 2 workers, through a kill, and after a resume.
"""

import pytest
import torch

import shoal
from shoal.checkpoint.sha256 import weights_sha256
from shoal.spec.run_paths import cache_directory
from tests.compat.same_bits import assert_same_bits
from tests.conftest import MLP

SHORT = MLP | {"steps": 10, "evaluate": {"every_steps": 5}, "lanes": 3}
BARE = {name: value for name, value in SHORT.items() if name not in ("model", "loss", "metrics", "evaluate")}
DATASET = {"kind": "python", "factory": "loops.py:Images"}
DCGAN = BARE | {"task": "loops.py:Dcgan", "data": {"source": DATASET}, "batch_size": 12}
WORDS = BARE | {
    "task": "loops.py:WordLanguageModel",
    "data": {
        "source": {"kind": "python", "factory": "loops.py:Columns"},
        "sampler": {"kind": "random", "shuffle": False},
    },
    "batch_size": 8,
    "lanes": 4,
    "steps": 24,
    "clip": {"norm": 0.25},
    "optimizer": {"name": "SGD", "args": {"lr": 1.0}},
}
ACTOR_CRITIC = BARE | {
    "task": "loops.py:ActorCritic",
    "data": {"source": {"kind": "python", "factory": "loops.py:Episodes"}},
    "batch_size": 10,
}

LBFGS = {"name": "LBFGS", "args": {"lr": 0.1, "max_iter": 4, "line_search_fn": "strong_wolfe"}}
SCHEDULE_FREE = {"name": "schedulefree:AdamWScheduleFree", "args": {"lr": 0.01, "warmup_steps": 3}}
LAYER_WISE = {
    "name": "AdamW",
    "args": {"lr": 0.01},
    "groups": [{"match": "first", "args": {"lr": 0.001}}, {"match": "blocks.0.*", "args": {"lr": 0.003}}],
}


@pytest.mark.compat("several optimizers and losses: DCGAN", "works", how="`Task.step` yields (loss, optimizer)")
def test_dcgan(run, resume, job_dir):
    assert_same_bits(run, resume, DCGAN, job_dir)


@pytest.mark.compat("several optimizers and losses: actor-critic", "works", how="`Task.step` yields (loss, optimizer)")
def test_actor_critic(run, resume, job_dir):
    assert_same_bits(run, resume, ACTOR_CRITIC, job_dir)


@pytest.mark.compat("hidden state between batches: word language model", "works", how="`Task.carries`, `self.carry`")
def test_word_language_model(run, resume, job_dir):
    one = assert_same_bits(run, resume, WORDS, job_dir)
    forgetful = run(WORDS | {"task": "loops.py:Forgetful"})
    assert forgetful.receipt.weights_sha256 != one.receipt.weights_sha256


@pytest.mark.compat("closures: LBFGS", "works", how="`optimizer: LBFGS`")
def test_lbfgs(run, resume, job_dir):
    assert_same_bits(run, resume, SHORT, job_dir, optimizer=LBFGS)


@pytest.mark.compat("schedule-free optimizers", "works", how="`optimizer: schedulefree:AdamWScheduleFree`")
def test_schedule_free(run, resume, job_dir):
    pytest.importorskip("schedulefree")
    one = assert_same_bits(run, resume, SHORT, job_dir, optimizer=SCHEDULE_FREE)
    rare = run(SHORT | {"optimizer": SCHEDULE_FREE, "evaluate": {"every_steps": 10}})
    assert rare.receipt.weights_sha256 == one.receipt.weights_sha256, "an evaluation changes no bit of the training"


@pytest.mark.compat("gradient accumulation", "works", how="`accumulate: 4`")
def test_accumulation(run, resume, job_dir):
    one = assert_same_bits(run, resume, SHORT, job_dir, lanes=2, accumulate=2)
    assert run(SHORT | {"lanes": 4}).receipt.weights_sha256 == one.receipt.weights_sha256


@pytest.mark.compat("EMA of weights", "works", how="`average: ema`")
@pytest.mark.compat("SWA", "works", how="`average: {kind: swa, start: 100}`")
@pytest.mark.parametrize("average", [{"kind": "ema", "decay": 0.9}, {"kind": "swa", "start": 4, "every": 2}])
def test_averages(run, resume, job_dir, average):
    one = assert_same_bits(run, resume, SHORT, job_dir, average=average, checkpoint={"every": "2 steps"})
    plain = run(SHORT)
    assert plain.receipt.weights_sha256 != one.receipt.weights_sha256
    exported = shoal.load(one.paths.root).state_dict()
    assert weights_sha256(exported) == one.receipt.weights_sha256
    best = shoal.load(one.paths.root, best=True).state_dict()  # from a checkpoint, where training goes on from others
    assert all(torch.equal(best[name], value) for name, value in exported.items())


@pytest.mark.compat("fp16 autocast with a loss scale", "works", how="`precision: fp16`")
@pytest.mark.compat("bf16 autocast", "works", how="`precision: bf16`")
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_precision(run, resume, job_dir, precision):
    one = assert_same_bits(run, resume, SHORT, job_dir, precision=precision)
    others = [run(SHORT, precision=other) for other in {"float32", "fp16", "bf16"} - {precision}]
    assert one.receipt.weights_sha256 not in [other.receipt.weights_sha256 for other in others]


@pytest.mark.compat("gradient checkpointing", "works", how="`gradient_checkpointing: ['blocks.*']`")
def test_gradient_checkpointing(run, resume, job_dir):
    model = {"model": "loops.py:Blocks"}
    one = assert_same_bits(run, resume, SHORT, job_dir, **model, gradient_checkpointing=["blocks.*"])
    assert run(SHORT | model).receipt.weights_sha256 == one.receipt.weights_sha256


@pytest.mark.compat("lazy modules: LazyLinear", "works", how="`model:`")
def test_lazy_modules(run, resume, job_dir):
    assert_same_bits(run, resume, SHORT, job_dir, model="loops.py:lazy")


@pytest.mark.compat("layer-wise learning rates", "works", how="`optimizer.groups`")
def test_layer_wise_learning_rates(run, resume, job_dir):
    one = assert_same_bits(run, resume, SHORT, job_dir, optimizer=LAYER_WISE, model="loops.py:Blocks")
    alike = run(SHORT, optimizer={name: LAYER_WISE[name] for name in ("name", "args")}, model="loops.py:Blocks")
    assert alike.receipt.weights_sha256 != one.receipt.weights_sha256


@pytest.mark.compat("an exchange on the device", "works", how="`sync: {kind: lanes, exchange: device}`")
def test_exchange_on_the_device(run, resume, job_dir):
    model = {"model": "loops.py:Blocks"}
    device = {"sync": {"kind": "lanes", "exchange": "device"}}
    one = assert_same_bits(run, resume, SHORT, job_dir, **model, **device)
    assert run(SHORT | model, workers=2).receipt.weights_sha256 == one.receipt.weights_sha256


@pytest.mark.compat("torch.compile", "works", how="`compile: true`")
def test_compiled_models(run, resume, job_dir):
    """One worker of a machine compiles; every other process finds the code, also in later runs."""
    first = run(SHORT, model="loops.py:Blocks", compile=True, workers=2)
    compiled = _compiled_code()
    assert compiled
    one = assert_same_bits(run, resume, SHORT, job_dir, model="loops.py:Blocks", compile=True)
    assert one.receipt.weights_sha256 == first.receipt.weights_sha256
    assert _compiled_code() == compiled
    assert one.receipt.weights_sha256 != run(SHORT | {"model": "loops.py:Blocks"}).receipt.weights_sha256


def _compiled_code():
    """The machine code in the cache, with the time at which it was written."""
    return {file: file.stat().st_mtime_ns for file in (cache_directory() / "compiled").rglob("*.so")}


# ---- what goes wrong in the middle, and what is refused ----


@pytest.mark.compat("several optimizers and losses: DCGAN", "works", how="`Task.step` yields (loss, optimizer)")
def test_a_worker_that_dies_between_two_phases_takes_the_step_back(run, job_dir):
    calm = run(DCGAN, workers=2)
    task = {"name": "loops.py:Dcgan", "args": {"kill_at": 6, "marks": str(job_dir)}}
    killed = run(DCGAN | {"task": task}, workers=2)
    assert killed.status == "finished", killed.error
    assert killed.receipt.deaths_survived == 1
    assert killed.receipt.weights_sha256 == calm.receipt.weights_sha256
    assert killed.receipt.state_sha256 == calm.receipt.state_sha256


@pytest.mark.compat("several optimizers with `sync: local`, `server` or `ddp`, or a codec", "refused SH860")
@pytest.mark.parametrize("changes", [{"sync": "local"}, {"sync": "server"}, {"sync": "ddp"}, {"codec": "bf16"}])
def test_several_optimizers_need_exact_lanes(run, changes):
    failure = run(DCGAN | changes).error
    assert failure.code == "SH860"
    assert "sync: lanes" in failure.fix


@pytest.mark.compat("phases that differ from batch to batch", "refused SH862")
def test_phases_that_differ_are_refused(run):
    assert run(DCGAN | {"task": "loops.py:Unsteady"}, workers=2).error.code == "SH862"


@pytest.mark.compat("an operation without a deterministic kernel", "works", how="the receipt says exact: no, and which")
def test_an_operation_without_a_deterministic_kernel_is_told(run):
    outcome = run(SHORT | {"model": "loops.py:Puts", "threads": 2})
    assert outcome.receipt.exact is False
    assert "put_ has no deterministic kernel" in outcome.receipt.why
