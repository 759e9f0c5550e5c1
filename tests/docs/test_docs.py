"""The documentation runs: every block that is marked is executed, every other piece of a job is checked."""

import re
import runpy
import shlex
import shutil
import signal
import subprocess
import sys

import pytest
import yaml

from shoal import cli
from shoal.jobs.fork_servers import ForkServerPool
from shoal.spec.load import load_job, make_job
from shoal.spec.receipt import Receipt
from tests.docs.pages import PAGES, ROOT, Block, blocks

SMALLEST = {
    "model": "model.py:Net",
    "loss": "CrossEntropyLoss",
    "data": {"source": {"kind": "sklearn", "name": "digits"}},
    "epochs": 1,
}


@pytest.fixture
def folder(tmp_path, fork_server, monkeypatch):
    """The demo's files, where workers come from the tests' fork server: no import of torch per command."""
    for file in (ROOT / "examples" / "digits").iterdir():
        if file.is_file():
            shutil.copy(file, tmp_path)
    monkeypatch.setattr(ForkServerPool, "get", lambda *_, **__: fork_server)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def shoal(line, monkeypatch):
    """A command line, in this process; fails unless it ends well."""
    monkeypatch.setattr(sys, "argv", shlex.split(line, comments=True))
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert left.value.code in (0, None), f"{line}: exit code {left.value.code}"


def play(block: Block, folder, monkeypatch):
    name = block.file or "block.py"
    if block.file or block.language == "python":
        (folder / name).write_text(block.text)
    if not block.is_executed:
        return
    if block.language == "yaml":
        (folder / "block.yaml").write_text(block.text)
        shoal("shoal run block.yaml -q --set export=[]", monkeypatch)  # an export takes longer than the rest
    elif block.language == "python":
        monkeypatch.syspath_prepend(str(folder))
        runpy.run_path(str(folder / name), run_name="__main__")
    else:
        for line in block.text.splitlines():
            shoal(line, monkeypatch)


MARKED = [page for page in PAGES if page.name != "README.md" and any(b.is_executed for b in blocks(page))]
SLOW = {
    "from-other-tools.md",
    "search.md",
    "data.md",
    "servers.md",
    "training.md",
    "checkpoints.md",
    "planning.md",
    "local.md",
    "compression.md",
    "shards.md",
    "workers.md",
    "runs.md",
    "job-file.md",
}


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=pytest.mark.long) if page.name in SLOW else page for page in MARKED],
    ids=lambda page: page.name,
)
def test_marked_blocks_run(page, folder, monkeypatch):
    for block in blocks(page):
        play(block, folder, monkeypatch)
    for name in [name for name, module in sys.modules.items() if _lies_in(module, folder)]:
        del sys.modules[name]


def _lies_in(module, folder):
    return str(getattr(module, "__file__", None) or "").startswith(str(folder))


PIECES = [
    (page, block) for page in PAGES for block in blocks(page) if block.language == "yaml" and not block.is_executed
]


@pytest.mark.parametrize(("page", "block"), PIECES, ids=lambda x: getattr(x, "name", ""))
def test_every_other_yaml_block_is_a_part_of_a_job(page, block):
    make_job(SMALLEST | yaml.safe_load(block.text), check_names=False)


# ---- the README ----


def readme(mark):
    (block,) = [b for b in blocks(ROOT / "README.md") if mark in b.marks]
    return [line for line in block.text.splitlines() if line]


def test_the_two_commands_are_in_the_makefile_and_the_demo_runs(folder, monkeypatch):
    """`make test` is what runs this; of `make demo` the recipe is run, not the installation."""
    makefile = (ROOT / "Makefile").read_text()
    assert readme("run") == ["make demo", "make test"]
    recipe = re.search(r"^demo:.*\n\t\$\(BIN\)/(shoal .*)$", makefile, re.MULTILINE)
    assert re.search(r"^test:", makefile, re.MULTILINE)
    shutil.copytree(ROOT / "examples" / "digits", folder / "examples" / "digits")
    shoal(f"{recipe[1]} -q", monkeypatch)


def test_the_tour_ends_with_the_same_weights(folder, monkeypatch):
    """As written, but with fewer epochs. Ctrl-C comes when the first steps have gone by."""
    shutil.copytree(ROOT / "examples" / "digits", folder / "examples" / "digits")
    for line in readme("tour"):
        line = line.replace("epochs=200", "epochs=30 --set export=[]")
        if "# press Ctrl-C" in line:
            _interrupted(line)
        else:
            shoal(line, monkeypatch)
    receipts = [Receipt.model_validate_json((folder / f"runs/digits-{n}/receipt.json").read_text()) for n in (1, 2)]
    assert receipts[0].starts == 2
    assert receipts[0].weights_sha256 == receipts[1].weights_sha256


def _interrupted(line):
    """In a process of its own, which gets a real SIGINT."""
    command = [sys.executable, "-c", "from shoal.cli import main; main()", *shlex.split(line, comments=True)[1:]]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        next(said for said in process.stdout if "evaluated" in said)
        process.send_signal(signal.SIGINT)
        process.stdout.read()
        assert process.wait() == 130


def test_the_job_in_the_readme_is_that_of_the_demo():
    """Shortened, it says: what it has, the demo has too."""
    (block,) = [b for b in blocks(ROOT / "README.md") if b.language == "yaml"]
    demo = load_job(ROOT / "examples" / "digits" / "job.yaml", check_names=False)
    shown = make_job(yaml.safe_load(block.text), check_names=False)
    for field in ("name", "model", "loss", "optimizer", "data", "batch_size", "epochs", "lanes"):
        assert getattr(shown, field) == getattr(demo, field)
