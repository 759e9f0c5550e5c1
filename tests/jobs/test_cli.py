"""The command line as a user meets it: real processes, exit codes, no traceback for a mistake."""

import json
import subprocess
import sys

import pytest
import typer
import yaml

from shoal.cli import app
from tests.conftest import MLP, long_only


def shoal(*words, cwd):
    command = [sys.executable, "-c", "from shoal.cli import main; main()", *map(str, words)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120)


def write(job_dir, job=MLP, name="job.yaml", **changes):
    (job_dir / name).write_text(yaml.safe_dump(job | changes))
    return job_dir / name


def test_help_is_quick_and_does_not_load_torch():
    program = (
        "import sys\nsys.argv = ['shoal', '--help']\nfrom shoal.cli import main\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code\n"
        "heavy = {'torch', 'numpy', 'sklearn', 'pydantic', 'pyarrow', 'yaml'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    for verb in ("run", "resume", "check", "plan", "split", "evaluate", "runs", "show", "compare", "join", "verify"):
        assert verb in done.stdout


def test_no_type_stands_beside_a_flag(capsys):
    program = typer.main.get_command(app)
    verbs = [program, *program.commands.values(), *program.commands["search"].commands.values()]
    flags = [flag for verb in verbs for flag in verb.get_params(typer.Context(verb)) if getattr(flag, "is_flag", False)]
    assert len(flags) > len(verbs)
    assert [(flag.name, flag.metavar) for flag in flags if flag.metavar != ""] == []
    with pytest.raises(SystemExit):
        app(["runs", "--help"])
    assert "bool" not in capsys.readouterr().out


def test_every_verb_stands_in_a_panel_of_the_help():
    verbs = [*app.registered_commands, *app.registered_groups]
    assert [verb.name or verb.callback.__name__ for verb in verbs if not verb.rich_help_panel] == []


@pytest.mark.long
def test_the_driver_never_loads_torch(job_dir):
    write(job_dir, steps=3)
    program = (
        "import sys, pathlib\nfrom shoal.cli import app\n"
        "for words in (['run', 'job.yaml', '-q'], ['check', 'job.yaml'], ['runs'], ['show', 'last']):\n"
        "    try:\n        app(words)\n    except SystemExit as end:\n        assert not end.code, words\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=job_dir, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.long
def test_a_run_says_what_it_does_before_its_first_step(job_dir):
    write(job_dir, sync="auto")
    said = shoal("run", "job.yaml", cwd=job_dir).stdout
    places = [said.find(words) for words in ("planning", "importing", "opening", "first batch", "step ", "sha256")]
    assert -1 not in places, said
    assert places == sorted(places)


@pytest.mark.long
def test_from_a_job_file_to_a_model_and_all_the_questions(job_dir):
    write(job_dir, best={"metric": "accuracy"})
    done = shoal("run", "job.yaml", cwd=job_dir)
    assert done.returncode == 0, done.stderr
    assert "exact" in done.stdout
    assert "sha256" in done.stdout
    (job_dir / "runs" / "mlp-1" / "receipt.json").read_text()

    again = shoal("run", "job.yaml", "--json", "--set", "optimizer.args.lr=0.01", cwd=job_dir)
    rows = [json.loads(line) for line in again.stdout.splitlines()]
    assert rows[0]["kind"] == "run_started"
    assert rows[-1]["kind"] == "receipt"
    assert {"built", "step", "evaluated", "finished"} <= {row["kind"] for row in rows}

    listed = json.loads(shoal("runs", "--json", cwd=job_dir).stdout)
    assert [(r["run"], r["status"]) for r in listed] == [("mlp-1", "finished"), ("mlp-2", "finished")]
    shown = shoal("show", "mlp-1", cwd=job_dir).stdout
    assert "training loss" in shown
    assert "⠀" in shown
    compared = shoal("compare", "mlp-1", "mlp-2", cwd=job_dir).stdout
    assert "optimizer.args.lr" in compared
    assert "batch_size" not in compared
    measured = json.loads(shoal("evaluate", "mlp-1", "--json", cwd=job_dir).stdout)
    receipt = json.loads((job_dir / "runs" / "mlp-1" / "receipt.json").read_text())
    assert measured["metrics"]["validation"] == receipt["metrics"]
    best = json.loads(shoal("evaluate", "mlp-1", "--best", "--json", cwd=job_dir).stdout)
    assert best["metrics"]["validation"]["accuracy"] == receipt["best"]["accuracy"]

    ended = shoal("resume", "mlp-1", cwd=job_dir)
    assert (ended.returncode, "SH604" in ended.stderr) == (6, True)


@pytest.mark.long
def test_the_resolved_job_can_be_run_again(job_dir):
    write(job_dir, steps=5)
    first = shoal("run", "job.yaml", "-q", "--set", "seed=4", cwd=job_dir)
    assert first.returncode == 0, first.stderr
    second = shoal("run", "runs/mlp-1/job.yaml", "-q", cwd=job_dir)
    assert second.returncode == 0, second.stderr
    receipts = [json.loads((job_dir / "runs" / f"mlp-{n}" / "receipt.json").read_text()) for n in (1, 2)]
    assert receipts[0]["weights_sha256"] == receipts[1]["weights_sha256"]
    assert receipts[0]["job_sha256"] == receipts[1]["job_sha256"]


@pytest.mark.long
def test_other_data_can_be_evaluated(job_dir):
    rows = "\n".join(f"{i % 7},{i % 3},{i % 2}" for i in range(60))
    (job_dir / "a.csv").write_text("u,v,y\n" + rows + "\n")
    (job_dir / "b.csv").write_text("u,v,y\n" + rows[: rows.index("\n", 100)] + "\n")
    source = {"kind": "csv", "path": "a.csv", "target": "y"}
    write(
        job_dir,
        model={"name": "models.py:mlp", "args": {"inputs": 2, "classes": 2}},
        steps=5,
        evaluate={},
        data={"source": source},
    )
    assert shoal("run", "job.yaml", "-q", cwd=job_dir).returncode == 0
    answer = json.loads(shoal("evaluate", "last", "--data", "b.csv", "--json", cwd=job_dir).stdout)
    assert answer["samples"]["data"] < 60
    missing = shoal("evaluate", "last", "--data", "c.csv", cwd=job_dir)
    assert (missing.returncode, "SH301" in missing.stderr) == (3, True)


@pytest.mark.parametrize(
    ("changes", "words", "code"),
    [
        ({"epoch": 3}, "SH103 job.yaml:", 2),
        ({"evaluate": {}, "data": {"source": {"kind": "csv", "path": "nowhere.csv"}}}, "SH301", 3),
        ({"model": {"name": "models.py:WrongInputWidth"}}, "SH715", 4),
        *long_only(({"model": {"name": "models.py:NanOutput"}}, "SH403", 4)),
    ],
)
def test_mistakes_have_exit_codes_and_no_traceback(job_dir, changes, words, code):
    write(job_dir, **changes)
    done = shoal("run", "job.yaml", cwd=job_dir)
    assert done.returncode == code, done.stderr
    assert words in done.stderr
    assert "→" in done.stderr
    assert "Traceback" not in done.stdout + done.stderr


@pytest.mark.long
def test_what_a_worker_prints_is_shown(job_dir):
    (job_dir / "chatty.py").write_text(
        "from models import mlp\ndef net():\n    print('hello from the model')\n    return mlp(64, 10)\n"
    )
    write(job_dir, model="chatty.py:net", steps=3)
    assert "hello from the model" in shoal("run", "job.yaml", cwd=job_dir).stdout


def test_unknown_runs_and_bad_words(job_dir):
    done = shoal("show", "nope", cwd=job_dir)
    assert (done.returncode, "SH601" in done.stderr) == (6, True)
    assert shoal("run", cwd=job_dir).returncode == 2
    assert shoal("swim", cwd=job_dir).returncode == 2


def test_a_script_without_a_guard_does_not_start_itself_again(run, job_dir):
    (job_dir / "script.py").write_text("import shoal\nfrom models import mlp\n\nshoal.run('job.yaml')\n")
    outcome = run(MLP, model={"name": "script.py:mlp", "args": {"inputs": 64, "classes": 10}})
    assert outcome.error.code == "SH608"
    assert "script.py:4" in outcome.error.where
