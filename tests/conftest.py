"""What the tests share: jobs run with real workers, forked from one fork server per test process."""

import contextlib
import copy
import os
import shutil
from pathlib import Path

import psutil
import pytest
import torch
from hypothesis import settings

from shoal.events.stream import STRICT_VARIABLE
from shoal.jobs import run_executor
from shoal.jobs.fork_servers import make_fork_server
from shoal.spec.load import make_job
from tests.compat.table import pytest_addoption, pytest_collection_modifyitems, pytest_configure  # noqa: F401

# How long an example takes is the machine's matter. Each run tries the same examples; HYPOTHESIS_PROFILE=explore draws
# others, and `make test-all` does so.
settings.register_profile("shoal", deadline=None, derandomize=True)
settings.register_profile("explore", deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "shoal"))

os.environ[STRICT_VARIABLE] = "1"  # workers and servers inherit it: an event that breaks the schema fails the test

FIXTURES = Path(__file__).parent / "fixtures"


def long_only(*parameters):
    """Those that only the long run of the tests tries."""
    rows = [parameter if isinstance(parameter, tuple) else (parameter,) for parameter in parameters]
    return [pytest.param(*row, marks=pytest.mark.long) for row in rows]


MLP = {
    "name": "mlp",
    "model": {"name": "models.py:mlp", "args": {"inputs": 64, "classes": 10}},
    "loss": "CrossEntropyLoss",
    "metrics": ["accuracy"],
    "optimizer": {"name": "SGD", "args": {"lr": 0.05, "momentum": 0.9}},
    "data": {"source": {"kind": "sklearn", "name": "digits"}, "split": {"kind": "holdout", "validation": 0.2}},
    "batch_size": 50,
    "steps": 60,
    "lanes": 4,
    "evaluate": {"every_steps": 20},
    "checkpoint": {"every": "never"},
    "export": [],
}

CNN = MLP | {
    "name": "cnn",
    "model": {"name": "models.py:cnn"},
    "optimizer": {"name": "AdamW", "args": {"lr": 0.002}},
    "schedule": {"name": "OneCycleLR", "args": {"max_lr": 0.01, "total_steps": "steps"}},
    "clip": {"norm": 1.0},
    "data": MLP["data"] | {"augment": "models.py:shift", "transform": "models.py:as_image"},
    "steps": 40,
    "lanes": 3,
}

GPT = MLP | {
    "name": "gpt",
    "model": {"name": "models.py:GPT", "args": {"vocabulary": 30}},
    "metrics": [],
    "optimizer": {"name": "AdamW", "args": {"lr": 0.003}},
    "schedule": {"name": "CosineAnnealingLR", "args": {"T_max": "steps"}},
    "clip": {"norm": 0.5},
    "data": {
        "source": {"kind": "text", "path": "text.txt", "context": 16},
        "split": {"kind": "holdout", "validation": 0.1},
    },
    "batch_size": 24,
    "steps": 30,
    "lanes": 4,
}


@pytest.fixture(autouse=True)
def own_threads():
    """A test that changes torch's threads changes no later test's sums. They are set even if torch says that they are
    the same: OpenMP's number is what it tells, and MKL may have another one."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory):
    """Tests leave the user's cache alone."""
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session")
def fork_server(cache):
    with make_fork_server(1, modules=["torchmetrics", "sklearn.datasets", "sklearn.model_selection"]) as made:
        yield made


@pytest.fixture
def job_dir(tmp_path):
    """A directory with the models that jobs refer to."""
    for file in FIXTURES.iterdir():
        if file.is_file():
            shutil.copy(file, tmp_path)
    words = ["shoal", "fish", "lane", "swims", "with", "the", "tide", "and", "turns", "again"]
    text = " ".join(words[(i * i + i // 3) % len(words)] for i in range(1200))
    (tmp_path / "text.txt").write_text(text)
    return tmp_path


@pytest.fixture
def run(job_dir, fork_server):
    """Run a job (plain data) and return its outcome; keyword arguments replace top-level fields."""

    def go(job, look=None, runs="runs", **changes):
        made = make_job(copy.deepcopy(job) | changes, base_dir=str(job_dir))
        return run_executor.run(made, runs=job_dir / runs, on_event=look, fork_server=fork_server)

    return go


@pytest.fixture
def resume(job_dir, fork_server):
    def go(paths, look=None, sets=()):
        return run_executor.resume(paths, on_event=look, overrides=sets, fork_server=fork_server)

    return go


def living(pids):
    """The processes among these that live; one may end at any moment."""
    found = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            found.append(psutil.Process(pid))
    return found
