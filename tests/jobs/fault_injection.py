"""What tests of disturbed runs share: the undisturbed run of each job, made once, and what must equal it."""

import contextlib
import json
import os
import signal
from pathlib import Path

import psutil

from shoal.events import read_events
from tests.conftest import CNN, GPT, MLP

JOBS = {"mlp": MLP | {"steps": 24}, "cnn": CNN | {"steps": 16}, "gpt": GPT | {"steps": 14}}
EXECUTION_FIELDS = ("workers", "elastic", "network", "watchers", "checkpoint", "look")
_references = {}


def reference_receipt(run, job, **changes):
    """The receipt of the job with one worker and no faults. How it is to be run is left out."""
    what = {name: value for name, value in (job | changes).items() if name not in EXECUTION_FIELDS}
    key = json.dumps(what, sort_keys=True)
    if key not in _references:
        _references[key] = run(what | {"checkpoint": {"every": "never"}}, runs="calm").receipt
    return _references[key]


def assert_same(outcome, receipt):
    """To the bit, and told the same."""
    assert outcome.status == "finished", outcome.error or outcome.status
    found = outcome.receipt
    assert found.weights_sha256 == receipt.weights_sha256, outcome.paths.root
    assert found.state_sha256 == receipt.state_sha256, outcome.paths.root
    assert found.metrics == receipt.metrics
    assert found.best == receipt.best
    assert (found.steps, found.samples_seen) == (receipt.steps, receipt.samples_seen)


@contextlib.contextmanager
def time_limit(seconds):
    """A run that stands still for ever is a failure like others."""

    def too_long(*_):
        raise TimeoutError(f"not finished in {seconds} s")

    before = signal.signal(signal.SIGALRM, too_long)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def fault_script(job_dir, *lines):
    """For `watchers:`."""
    return [{"name": "faults.py:FaultScript", "args": {"lines": list(lines), "marks": str(job_dir)}}]


def fired_faults(job_dir):
    """The lines of the script that were carried out."""
    return {file.name.removesuffix(".fired") for file in Path(job_dir).glob("*.fired")}


def events_of_kind(outcome, kind):
    return [event for event in read_events(outcome.paths.events) if event.kind == kind]


def assert_nothing_left(outcome):
    """No process of this run, and nothing that tells of one."""
    root = outcome.paths.root
    assert not list(root.glob(".seat-*.lock"))
    assert not processes_of(root)


def processes_of(root):
    """Forked workers keep their fork server's command line; their output tells which run they belong to."""
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit() and int(process.name) != os.getpid():
            with contextlib.suppress(OSError):
                if str(root) in os.readlink(process / "fd" / "1") or str(root) in os.readlink(process / "fd" / "2"):
                    found.append(int(process.name))
    return found


def open_resources(pid):
    """What a process has open."""
    files = []
    for file in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            files.append(os.readlink(file))
    return {
        "arenas": sum("memfd:shoal" in file for file in files),
        "mapped": Path(f"/proc/{pid}/maps").read_text().count("memfd:shoal"),
        "sockets": sum(file.startswith("socket:") for file in files),
        "descriptors": len(files),
        "threads": len(list(Path(f"/proc/{pid}/task").iterdir())),
    }


def assert_token_is_hidden(paths, *places):
    """It is in no command line, no environment and none of these texts."""
    token = json.loads(paths.driver_address.read_text())["token"]
    shown = list(places)
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            shown += [repr(process.cmdline()), repr(process.environ())]
    assert len(shown) > 2
    assert not [text[:200] for text in shown if token in text]
