"""Ports of scripts: the original beside its port, from the same weights and over the same batches."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

import shoal
from tests.compat.same_bits import assert_same_bits

pytestmark = pytest.mark.compat
PORTS = Path(__file__).parents[2] / "examples" / "ports"
MOST_APART = 1e-3
"""How far the results of an original and of its port may be apart, as a share of the way from the first weights."""


@pytest.fixture
def ports(tmp_path):
    shutil.copytree(PORTS, tmp_path / "ports", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path / "ports"


@pytest.fixture
def program(ports, cache):
    """Call a program in the directory of the ports. `last_words`: of one that fails well, when it has done its work."""

    def go(*words, last_words=None):
        paths = os.pathsep.join(filter(None, [str(ports), os.environ.get("PYTHONPATH")]))
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths, "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(
            [str(word) for word in words], cwd=ports, env=environment, capture_output=True, text=True, timeout=500
        )
        assert done.returncode == 0 or (last_words and last_words in done.stderr), done.stderr[-3000:]
        return done.stdout

    return go


def shoal_run(program, file, workers):
    """The run of a job file."""
    program(sys.executable, "-m", "shoal", "run", file, "--workers", workers, "--runs", f"runs-{workers}", "-q")


def trained_by_port(ports):
    """The trained weights, the same on 1 and 2 workers."""
    roots = [next((ports / f"runs-{workers}").glob("from-*")) for workers in (1, 2)]
    one, two = (shoal.load(root).state_dict() for root in roots)
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)
    return one


def assert_same_training(original, port, start):
    assert original.keys() == port.keys() == start.keys()
    names = [name for name in start if start[name].is_floating_point()]

    def distance(one, other):
        return torch.linalg.vector_norm(torch.cat([(one[n] - other[n]).flatten().double() for n in names])).item()

    assert distance(original, start) > 0.1  # it has learnt something
    assert distance(original, port) < MOST_APART * distance(original, start)


@pytest.fixture
def first_weights(ports, monkeypatch):
    def go(module, name):
        monkeypatch.syspath_prepend(str(ports))
        monkeypatch.delitem(sys.modules, module, raising=False)
        made = getattr(__import__(module), name)()
        monkeypatch.delitem(sys.modules, module)
        return made.state_dict()

    return go


@pytest.mark.compat("a script for torchrun and DistributedDataParallel", "works", how="`examples/ports/ddp.yaml`")
def test_ddp(program, ports, first_weights):
    run = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "original_ddp.py", "ddp.pt")
    # torch 2.13 with gloo sometimes aborts one of its processes at the very end
    program(sys.executable, *run, last_words="terminate called without an active exception")
    for workers in (1, 2):
        shoal_run(program, "ddp.yaml", workers)
    assert_same_training(torch.load(ports / "ddp.pt"), trained_by_port(ports), first_weights("net", "Net"))


@pytest.mark.compat("a LightningModule", "works", how="`examples/ports/lightning.yaml`")
def test_lightning(program, ports, first_weights):
    program(sys.executable, "original_lightning.py", "lightning.pt")
    for workers in (1, 2):
        shoal_run(program, "lightning.yaml", workers)
    assert_same_training(torch.load(ports / "lightning.pt"), trained_by_port(ports), first_weights("net", "Net"))


@pytest.mark.compat("a script for Accelerate", "works", how="`examples/ports/ported_accelerate.py`")
def test_accelerate(program, ports, first_weights):
    program(sys.executable, "original_accelerate.py", "accelerate.pt")
    for workers in (1, 2):
        program(sys.executable, "ported_accelerate.py", workers, f"runs-{workers}")
    assert_same_training(torch.load(ports / "accelerate.pt"), trained_by_port(ports), first_weights("net", "Net"))


@pytest.mark.compat("a script for the HF Trainer", "works", how="`examples/ports/trainer.yaml`")
def test_trainer(program, ports, first_weights):
    program(sys.executable, "original_trainer.py", "trained")
    for workers in (1, 2):
        shoal_run(program, "trainer.yaml", workers)
    original = load_file(ports / "trained" / "model.safetensors")
    assert_same_training(original, trained_by_port(ports), first_weights("reviews", "bert"))


@pytest.mark.parametrize("name", ["ddp", "lightning", "trainer"])
def test_a_port_has_the_same_bits_through_a_kill_and_a_resume(name, run, resume, job_dir):
    shutil.copytree(PORTS, job_dir, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    job = yaml.safe_load((job_dir / f"{name}.yaml").read_text())
    assert_same_bits(run, resume, job, job_dir)


def test_a_ported_script_has_the_same_bits_through_a_kill_and_a_resume(run, resume, job_dir, monkeypatch):
    shutil.copytree(PORTS, job_dir, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.syspath_prepend(str(job_dir))
    monkeypatch.setattr(shoal, "run", _ask)
    with pytest.raises(Asked) as asked:
        __import__("ported_accelerate").main()
    made = asked.value.args[0]
    job = {name: value for name, value in made.dump().items() if name not in ("base_dir", "workers")}
    assert_same_bits(run, resume, job, job_dir)


class Asked(Exception):
    """What a script asks Shoal to run."""


def _ask(job, runs):
    raise Asked(job)
