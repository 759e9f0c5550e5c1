"""A compressed run is a run like any other; the parent stays as it was; a recipe gives the same bytes again."""

import json
import sys

import pytest
import torch

from shoal import api, cli
from shoal.cli import compress as compress_verb
from shoal.errors import ShoalError
from shoal.jobs.compression.compress import Compressed, CompressRequest, replay
from shoal.jobs.compression.workshop import Workshop
from shoal.jobs.fork_servers import ForkServerPool
from shoal.jobs.probes import run_probe
from shoal.jobs.run_index import run_summary
from shoal.plan.compression import tune_job
from shoal.spec.compression.measured import CompressionReport, read_recipe, read_report
from shoal.spec.compression.steps import TuneStep
from shoal.spec.load import load_run_job, make_job
from shoal.spec.run_paths import RunPaths
from tests.conftest import CNN
from tests.jobs.compression.conftest import PARENT, digests


def test_lossless_from_the_run_to_the_replay(run, compressed, job_dir, fork_server, monkeypatch, capsys):
    parent = run(PARENT)
    before = digests(parent.paths.root)
    judged = []
    judge = Workshop.judge_all
    monkeypatch.setattr(Workshop, "judge_all", lambda *a, **k: judged.append(k["part"]) or judge(*a, **k))
    made = compressed(parent, steps=["lossless"])
    assert digests(parent.paths.root) == before
    assert judged == ["validation", "validation", "test"]  # the test part is looked at once, at the end

    report = made.report
    row = report.rungs[-1]
    assert (row.name, row.kept) == ("lossless", True)
    assert report.chosen == "lossless"
    assert row.certificate.claim == "proven"
    assert row.certificate.difference_points < 1e-9
    assert row.certificate.difference_float64 < 1e-9
    assert row.quality.changed == 0
    assert report.test.part == "test"
    assert report.test.samples == round(1797 * 0.2)
    assert any("cannot show a drop" in note for note in report.notes)

    file = made.paths.model / "model.safetensors"
    assert row.artefact.size_bytes == file.stat().st_size < before_size(parent)
    assert row.artefact.path == "model.safetensors"
    assert not (made.paths.root / "rungs").exists()
    rungs = (made.paths.root / "compression.csv").read_text().splitlines()
    assert [line.partition(",")[0] for line in rungs] == ["rung", "parent", "lossless"]
    front = [line.rpartition(",")[2] for line in rungs]
    assert (front[0], front[-1]) == ("front", "1"), "smaller, and the same answers"
    plot = (made.paths.root / "compression.svg").read_text()
    assert plot.count("<circle") == 2
    assert plot.count('stroke="#e76f51" fill="#26a"') == front.count("1"), "the parent too, where it is as fast"
    assert row.size_ratio == file.stat().st_size / before_size(parent)
    assert read_report(made.paths.root / "compression.json") == report

    # like any other run
    small, whole = (api.load(one.paths.root) for one in (made, parent))
    assert small[0].out_features == 12
    x = torch.rand(50, 64) * 16
    assert (small(x) - whole(x)).abs().max() < 1e-3
    row = run_summary(made.paths)
    assert row["status"] == "finished"
    job = load_run_job(made.paths.job)
    answer = run_probe(
        "evaluate", job, fork_server=fork_server, weights=str(made.paths.model), part="validation", source=None
    )
    assert answer["metrics"]["validation"]["accuracy"] == pytest.approx(report.rungs[-1].quality.value)
    monkeypatch.setattr(ForkServerPool, "get", lambda *_, **__: fork_server)
    monkeypatch.chdir(job_dir)
    for words in (("show", made.paths.name), ("compare", parent.paths.name, made.paths.name)):
        monkeypatch.setattr(sys, "argv", ["shoal", *words])
        with pytest.raises(SystemExit) as left:
            cli.main()
        assert not left.value.code
    said = " ".join(capsys.readouterr().out.split())
    assert "random inputs" in said
    assert "CPU time per call with 1 thread" in said

    # again, from the recipe
    recipe = read_recipe(made.paths.root / "recipe.json")
    words = ["shoal", "compress", parent.paths.name, "--replay", str(made.paths.root / "recipe.json")]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert not left.value.code
    again = RunPaths.at(job_dir / "runs" / "parent-compressed-2")
    assert (again.model / "model.safetensors").read_bytes() == file.read_bytes()
    assert {one.name for one in again.model.iterdir()} == {"model.safetensors", "model.json"}, "nothing is pickled"

    request = CompressRequest(parent.paths, job_dir / "runs")
    with pytest.raises(ShoalError, match="the recipe is for weights 000000000000") as refused:
        replay(request, recipe.model_copy(update={"parent_sha256": "0" * 64}), fork_server=fork_server)
    assert refused.value.code == "SH666"
    assert run_summary(RunPaths.at(job_dir / "runs" / "parent-compressed-3"))["status"] == "failed"


def test_targets_that_are_not_met_have_an_exit_code_of_their_own(tmp_path, capsys):
    """The best that was found is named."""
    report = CompressionReport(parent="one-1", parent_sha256="0" * 64, rungs=[], chosen="int8", targets_met=False)
    made = Compressed(RunPaths.at(tmp_path / "one-compressed-1"), report)
    code = compress_verb._missed(made)
    assert code == 6
    said = capsys.readouterr().err
    assert "SH663" in said
    assert "the best that was found is 'int8', in one-compressed-1" in " ".join(said.split())


def test_tuning_does_not_look_at_the_test_part(run, job_dir):
    job = make_job(PARENT | {"evaluate": {"every_steps": 7}}, base_dir=str(job_dir))
    tuning = tune_job(job, TuneStep(epochs=1), shape=[], weights=None, teacher=None)
    assert tuning.evaluate == job.evaluate.model_copy(update={"test": False})
    assert tuning.sha256() != job.sha256()
    measured = run(PARENT | {"steps": 2, "evaluate": {"test": False}}).receipt.metrics
    assert "accuracy" in measured
    assert not any(name.startswith("test/") for name in measured)


def test_the_factor_of_the_rate_holds_for_a_schedule_with_a_rate_of_its_own(job_dir):
    job = make_job(CNN, base_dir=str(job_dir))
    half, same = (tune_job(job, TuneStep(lr=lr), shape=[], weights=None, teacher=None) for lr in (0.5, 1.0))
    assert half.schedule.args == {"max_lr": 0.005, "total_steps": "steps"}
    assert half.optimizer.args == {"lr": 0.001}
    assert (same.schedule, same.optimizer) == (job.schedule, job.optimizer)
    scratch = tune_job(job, TuneStep(lr=0.5, scratch=True), shape=[], weights=None, teacher=None)
    assert scratch.schedule == job.schedule
    per_group = job.schedule.model_copy(update={"args": {"max_lr": [0.01, 0.02]}})
    found = tune_job(
        job.model_copy(update={"schedule": per_group}), TuneStep(lr=0.5), shape=[], weights=None, teacher=None
    )
    assert found.schedule.args == {"max_lr": [0.005, 0.01]}


def before_size(parent):
    return (parent.paths.model / "model.safetensors").stat().st_size


@pytest.fixture
def command(job_dir, monkeypatch, capsys):
    def go(*words):
        monkeypatch.chdir(job_dir)
        monkeypatch.setattr(sys, "argv", ["shoal", *map(str, words)])
        with pytest.raises(SystemExit) as left:
            cli.main()
        return left.value.code, capsys.readouterr()

    return go


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--target", "speed<2"), "'speed<2' is not a target"),
        (("--target", "size<120%"), "'size<120%' is not a target"),
        (("--target", "size<20%", "--target", "size<10%"), "'size<10%' is not a target"),
        (("--max-drop", "much"), "'much' is not a drop"),
        (("--workers", "none"), "not a number of workers"),
        (("--replay", "recipe.json", "--lossless"), "--replay takes the steps of the recipe"),
        (("--replay", "recipe.json", "--target", "size<20%"), "--replay takes the steps of the recipe"),
        (("--replay", "recipe.json", "--max-drop", "1%"), "--replay takes the steps of the recipe"),
    ],
)
def test_bad_words_on_the_command_line(command, job_dir, words, said):
    (job_dir / "runs" / "one-1").mkdir(parents=True)
    (job_dir / "runs" / "one-1" / "job.yaml").write_text(json.dumps(PARENT))
    code, printed = command("compress", "one-1", *words)
    assert code == 6
    assert "SH609" in printed.err
    assert said in printed.err
    assert len(list((job_dir / "runs").iterdir())) == 1


def test_a_target_that_cannot_be_met_leaves_the_best_that_was_found(run, command, job_dir, fork_server, monkeypatch):
    """What is asked for stands in the job."""
    parent = run(PARENT | {"compress": {"steps": ["lossless"], "target": {"size": "10%"}}})
    before = digests(parent.paths.root)
    monkeypatch.setattr(ForkServerPool, "get", lambda *_, **__: fork_server)
    code, printed = command("compress", parent.paths.name)
    assert code == 6
    assert "SH663" in printed.err
    assert "It does not meet the targets" in " ".join(printed.out.split())
    assert digests(parent.paths.root) == before
    report = read_report(job_dir / "runs" / "parent-compressed-1" / "compression.json")
    assert (report.chosen, report.targets_met) == ("lossless", False)
    assert api.load(job_dir / "runs" / "parent-compressed-1")[0].out_features == 12


def test_options_replace_fields_of_the_section(job_dir):
    section = {"target": {"size": "30%", "latency": "40%"}, "max_drop": "2%", "steps": ["prune"], "tune": {"epochs": 7}}
    config = make_job(PARENT | {"compress": section}, base_dir=str(job_dir)).compress
    assert compress_verb._config(config, [], "", lossless=False) == config
    assert (config.target.size, config.target.latency, config.max_drop, config.rungs) == (0.3, 0.4, 0.02, ("prune",))
    changed = compress_verb._config(config, ["size<10%"], "1%", lossless=True)
    assert (changed.target.size, changed.target.latency, changed.max_drop) == (0.1, None, 0.01)
    assert (changed.rungs, changed.tune.epochs) == (("lossless",), 7)


def test_a_file_that_is_no_recipe(command, job_dir):
    (job_dir / "runs" / "one-1").mkdir(parents=True)
    (job_dir / "runs" / "one-1" / "job.yaml").write_text(json.dumps(PARENT))
    (job_dir / "recipe.json").write_text('{"steps": [{"kind": "guess"}]}')
    code, printed = command("compress", "one-1", "--replay", "recipe.json")
    assert code == 6
    assert "SH661" in printed.err
