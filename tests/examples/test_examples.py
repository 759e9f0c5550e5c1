"""Every example runs, learns something, and stays small."""

import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import shoal
from shoal.data.source import open_source
from shoal.data.split import split
from shoal.errors import ShoalError
from shoal.jobs import run_dir, run_executor
from shoal.jobs.probes import run_probe
from shoal.spec.load import load_job
from tests.examples import synthetic_data

EXAMPLES = Path(__file__).parents[2] / "examples"
NAMES = sorted(path.name for path in EXAMPLES.iterdir() if path.is_dir())
PROGRAMS = sorted(EXAMPLES.glob("*/*.py"))


@pytest.fixture
def job_dir(tmp_path):
    """A copy of the examples, without data that somebody may have put there."""
    shutil.copytree(EXAMPLES, tmp_path / "examples", ignore=shutil.ignore_patterns("data", "__pycache__"))
    return tmp_path / "examples"


@pytest.fixture
def run(job_dir, fork_server):
    """Run a job file of the copy with some fields changed."""

    def go(file, *changes):
        job = load_job(job_dir / file, overrides=["export=[]", *changes])
        outcome = run_executor.run(job, runs=job_dir / "runs", fork_server=fork_server)
        assert outcome.error is None, outcome.error
        assert outcome.status == "finished"
        return outcome

    return go


@pytest.fixture
def script(job_dir, monkeypatch, capsys):
    """What a script prints that is called as on the command line."""

    def go(file, *words):
        monkeypatch.setattr(sys, "argv", [file, *words, "--runs", str(job_dir / "runs")])
        runpy.run_path(str(job_dir / file), run_name="__main__")
        return capsys.readouterr().out

    return go


# ---- running ----


def test_digits(run):
    assert run("digits/job.yaml", "epochs=12").receipt.metrics["accuracy"] >= 0.97


def test_mnist(run, job_dir):
    synthetic_data.mnist(job_dir / "mnist" / "data")
    receipt = run("mnist/job.yaml", "epochs=8", "model.args.width=4").receipt
    assert receipt.metrics["test/accuracy"] >= 0.9
    assert receipt.exact


def test_gpt(run, script, job_dir):
    synthetic_data.text(job_dir / "gpt" / "data" / "input.txt")
    small = ["model.args.context=16", "model.args.width=32", "model.args.layers=1", "data.source.context=16"]
    metrics = run("gpt/job.yaml", *small, "steps=150", "evaluate.every_steps=150").receipt.metrics
    assert metrics["perplexity"] < 4
    written = script("gpt/sample.py", "gpt-1", "--prompt", "To be", "--length", "20", "--temperature", "0.1")
    assert written == "To be, or not to be, that\n"


def test_ett(run, job_dir):
    synthetic_data.hourly(job_dir / "ett" / "data" / "ETTh1.csv", rows=500)
    sizes = [f"{where}.args.{name}" for where in ("model", "data.source.factory") for name in ("past=24", "ahead=6")]
    summary = run("ett/job.yaml", *sizes, "data.split.gap=30", "batch_size=32", "epochs=6")
    assert len(summary.folds) == 4
    mean, deviation = summary.metrics["mae"]
    assert mean < 3  # the mean would be 6 degrees off
    assert deviation > 0


def test_no_row_of_ett_is_on_both_sides(job_dir):
    synthetic_data.hourly(job_dir / "ett" / "data" / "ETTh1.csv", rows=1200)
    job = load_job(job_dir / "ett" / "job.yaml")
    source = open_source(job.data.source, base_dir=job.base_dir)
    length = job.model.args["past"] + job.model.args["ahead"]
    assert len(source) == 1200 - length + 1
    ends = []
    for fold in range(job.data.split.folds):
        parts = split(job.data.split, source, seed=job.seed, fold=fold)
        assert parts.train.max() + length <= parts.validation.min()  # a sample covers `length` rows from its own on
        ends.append(parts.train.max())
        assert parts.train.min() == 0
    assert ends == sorted(set(ends))


def test_tabular(run, job_dir):
    summary = run("tabular/job.yaml", "epochs=5")
    assert len(summary.folds) == 5
    mean, deviation = summary.metrics["accuracy"]
    assert mean > 0.94
    assert 0 < deviation < 0.05
    with pytest.raises(ShoalError, match="tabular-1/fold-0 to fold-4"):
        shoal.load("tabular-1", runs=job_dir / "runs")
    assert not shoal.load("tabular-1/fold-0", runs=job_dir / "runs").training


def test_tabular_from_a_file(run, job_dir):
    synthetic_data.table(job_dir / "tabular" / "table.csv")
    source = "data.source={kind: csv, path: table.csv, target: diagnosis}"
    assert run("tabular/job.yaml", source, "data.split.fold=0", "epochs=5").receipt.metrics["accuracy"] > 0.9


def test_recommend(run):
    metrics = run("recommend/job.yaml", "epochs=4").receipt.metrics
    assert metrics["test/auc"] > 0.8


def test_clicks(run):
    few = [f"data.source.factory.args.{size}" for size in ("users=2000", "items=500", "count=40000")]
    metrics = run("clicks/job.yaml", *few, "batch_size=1024").receipt.metrics
    assert metrics["auc"] > 0.75


def test_transfer(run, script, job_dir, fork_server):
    run("transfer/backbone.yaml", "epochs=4")
    job = run_dir.resolve_init_from(load_job(job_dir / "transfer" / "job.yaml"), job_dir / "runs")
    facts = run_probe("check", job, fork_server=fork_server)
    assert 0 < facts["trainable"] < facts["parameters"]
    assert run("transfer/job.yaml").receipt.metrics["accuracy"] > 0.8
    lines = script("transfer/changed.py").splitlines()
    assert {line.split()[-1].split(".")[0]: line[:10].strip() for line in lines} == {
        "early": "the same",
        "late": "changed",
    }
    assert all(line.startswith("the same") == ("early" in line) for line in lines)


def test_transfer_without_its_backbone(run):
    with pytest.raises(ShoalError, match="there is no run 'backbone-1'") as caught:
        run("transfer/job.yaml")
    assert (caught.value.code, caught.value.where) == ("SH601", "init_from.path")


def test_script(job_dir):
    command = [sys.executable, str(job_dir / "script" / "train.py")]
    done = subprocess.run(command, cwd=job_dir, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert float(re.findall(r"accuracy (\S+)", done.stdout)[-1]) > 0.95
    receipt = run_dir.find("script-1", job_dir / "runs").receipt.read_text()
    assert re.search(r"weights (\w{64})", done.stdout)[1] in receipt


# ---- reading ----


@pytest.mark.parametrize("name", NAMES)
def test_each_says_how_to_run_it(name):
    text = (EXAMPLES / name / "README.md").read_text()
    files = re.findall(r"examples/\S+\.(?:yaml|py)", text)
    assert files
    assert all((EXAMPLES.parent / file).is_file() for file in files)
    assert name in (EXAMPLES / "README.md").read_text()


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_the_programs_are_short(path):
    assert len(path.read_text().splitlines()) < 60


# ---- TensorFlow ----


@pytest.fixture(scope="session")
def keras():
    """An interpreter that has TensorFlow."""
    python = os.environ.get("KERAS_PYTHON", sys.executable)
    if subprocess.run([python, "-c", "import tensorflow"], capture_output=True).returncode:
        pytest.skip(f"TensorFlow cannot be imported by {python}; set KERAS_PYTHON to an interpreter that has it")
    return python


@pytest.mark.keras
@pytest.mark.parametrize("words", [["--kill"], ["--staleness=inf", "--data=mnist"]], ids=["killed", "asynchronous"])
def test_servers_keras(words, keras, job_dir):
    synthetic_data.mnist(job_dir / "mnist-files")
    words = [word.replace("=mnist", f"={job_dir / 'mnist-files'}") for word in words]
    command = [keras, str(job_dir / "servers-keras" / "train.py"), f"--python={sys.executable}", "--steps=120", *words]
    environment = os.environ | {"PYTHONPATH": str(Path(shoal.__file__).parents[1])}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
    assert float(re.search(r"accuracy (\S+)", done.stdout)[1]) > 0.9
