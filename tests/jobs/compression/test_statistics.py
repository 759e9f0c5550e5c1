"""Importance and calibration on several workers: the same masks and ranges for every number of them, through kills."""

import pytest

from shoal.jobs.compression.workshop import Workshop
from shoal.jobs.coroutines import all_steps, run_steps
from shoal.plan.compression import divide_lanes, join_ranges
from shoal.spec.compression.steps import OnnxStep
from shoal.spec.job import WorkersConfig
from shoal.spec.load import load_run_job
from tests.jobs.compression.conftest import PARENT


@pytest.fixture
def workshops(job_dir, fork_server):
    """A workshop for each number of workers, with the same parent."""

    for library in ("onnx", "onnxscript", "onnxruntime", "torch_pruning"):
        pytest.importorskip(library, reason="the extra compress is not installed")

    def make(parent, *numbers):
        job = load_run_job(parent.paths.job)
        for number in numbers:
            update = {"workers": WorkersConfig(least=number, most=number)}
            workshop = Workshop(job.model_copy(update=update), job_dir / f"work-{number}", fork_server=fork_server)
            workshop.open_parent(str(parent.paths.model))
            yield workshop

    return make


@pytest.mark.long
@pytest.mark.parametrize("importance", ["taylor", "zeros"])
def test_the_same_channels_are_pruned_by_one_worker_and_by_several(run, workshops, importance):
    parent = run(PARENT | {"lanes": 3, "steps": 20})
    found = []
    for workshop in workshops(parent, 1, 2):
        cut, facts = workshop.prune(workshop.parent, "prune", remove=0.5, importance=importance)
        found.append((facts.steps, cut.weights.sha256))
    assert found[0] == found[1]
    assert found[0][0][0].layers["0"].out


@pytest.mark.long
def test_a_worker_that_is_killed_while_it_measures_is_replaced(run, workshops, job_dir):
    mark = job_dir / "armed"
    model = {"name": "compressible.py:deadly", "args": {"inputs": 64, "classes": 10, "mark": str(mark)}}
    parent = run(PARENT | {"model": model, "steps": 10})
    (workshop,) = workshops(parent, 2)
    undisturbed = workshop.prune(workshop.parent, "prune", remove=0.5, importance="taylor")[0].weights.sha256
    mark.touch()
    killed = workshop.prune(workshop.parent, "prune", remove=0.5, importance="taylor")[0].weights.sha256
    assert not mark.exists()
    assert killed == undisturbed


@pytest.mark.long
def test_a_worker_that_is_killed_while_it_calibrates_is_replaced(run, workshops, job_dir):
    """The transform of the data kills it: nothing else of the user's code runs there."""
    transform = {"name": "compressible.py:deadly_transform", "args": {"mark": str(job_dir / "armed")}}
    parent = run(PARENT | {"data": PARENT["data"] | {"transform": transform}, "lanes": 3, "steps": 10})
    (workshop,) = workshops(parent, 2)
    undisturbed = workshop.take(workshop.parent, OnnxStep(bits=8)).artefact.sha256
    ask = workshop._ask_workers

    def arm_and_ask(kind, action, questions):
        assert action == "ranges"
        (job_dir / "armed").touch()
        return ask(kind, action, questions)

    workshop._ask_workers = arm_and_ask
    killed = workshop.take(workshop.parent, OnnxStep(bits=8)).artefact.sha256
    assert not (job_dir / "armed").exists()
    assert killed == undisturbed


@pytest.mark.long
def test_the_same_ranges_on_one_worker_and_on_several(run, workshops):
    for library in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(library, reason="the extra compress is not installed")
    parent = run(PARENT | {"lanes": 3, "steps": 20})
    files = [
        workshop.take(workshop.parent, OnnxStep(bits=8)).artefact.sha256 for workshop in workshops(parent, 1, 2, 3)
    ]
    assert len(set(files)) == 1


@pytest.mark.parametrize("lanes", [1, 2, 5, 8])
@pytest.mark.parametrize("workers", [1, 2, 3, 9])
def test_lanes_are_divided_without_a_rest(lanes, workers):
    parts = divide_lanes(lanes, workers)
    assert [lane for part in parts for lane in part] == list(range(lanes))
    assert len(parts) == min(lanes, workers)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_ranges_are_joined_by_their_ends():
    parts = [{"b": (0.5, 1.0), "a": (-1.0, 0.0)}, {}, {"a": (-2.0, -0.5), "b": (0.0, 3.0)}]
    assert join_ranges(parts) == join_ranges(parts[::-1]) == {"a": (-2.0, 0.0), "b": (0.0, 3.0)}


def test_steps_run_together_and_the_first_failure_ends_the_others():
    ended = []

    def count(to, *, fail=False):
        try:
            for _ in range(to):
                yield []
            if fail:
                raise ValueError("too far")
            return to
        finally:
            ended.append(to)

    assert run_steps(all_steps([count(3), count(1)])) == [3, 1]
    with pytest.raises(ValueError, match="too far"):
        run_steps(all_steps([count(9), count(2, fail=True)]))
    assert ended == [1, 3, 2, 9]
