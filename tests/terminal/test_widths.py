"""The display in a real terminal of different widths: pyte interprets what is sent to it."""

import fcntl
import io
import os
import pty
import struct
import termios
import threading

import pytest
from rich.console import Console

from shoal.events import Event, replay
from shoal.jobs.search.journal import StartedRow
from shoal.jobs.search.search_dir import create
from shoal.jobs.search.table import Judge
from shoal.spec.run_paths import RunPaths
from shoal.terminal.live import LiveDisplay
from shoal.terminal.reports import print_runs
from shoal.terminal.search_live import MAX_TRIALS_SHOWN, trial_table
from tests.jobs.search.test_replay import WHOLE, search_job
from tests.terminal.test_display import EVENTS, SERVERS
from tests.terminal.test_search_display import progress_of

pyte = pytest.importorskip("pyte")
WIDTHS = [40, 60, 80, 200]


class Terminal:
    """A pseudo-terminal of this width, and the screen that a person would see."""

    def __init__(self, width, height=30):
        self.screen = pyte.HistoryScreen(width, height)
        self._stream = pyte.ByteStream(self.screen)
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))
        self.file = os.fdopen(slave, "w")
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self):
        while True:
            try:
                content = os.read(self._master, 65536)
            except OSError:  # the other end is closed
                return
            if not content:
                return
            self._stream.feed(content)

    def lines(self):
        """The lines of the screen, after everything was sent."""
        self.file.close()
        self._thread.join()
        os.close(self._master)
        return [line.rstrip() for line in self.screen.display if line.strip()]


def shown(width, events, tmp_path, name="mlp-1"):
    terminal = Terminal(width)
    console = Console(file=terminal.file, force_terminal=True, width=width, height=30)
    state = replay([])
    with LiveDisplay(console) as display:
        for event in events:
            state.apply(event)
            display.on_event(RunPaths(tmp_path / name), event, state)
        display._live.refresh()
    return terminal.lines()


@pytest.mark.parametrize("width", WIDTHS)
def test_every_fact_stands_on_its_line(width, tmp_path, monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    lines = shown(width, EVENTS, tmp_path)
    bar = [line for line in lines if "7/90" in line]
    assert len(bar) == 1, lines  # no stale bar is left above
    assert bar[0].startswith("mlp-1")
    workers = [line for line in lines if line.strip().startswith("worker-")]
    assert [line.split()[:2] for line in workers] == [["worker-0", "training"], ["worker-1", "training"]]
    assert all("step" in line for line in workers)
    if width >= 80:
        assert "ETA" in bar[0]
        assert "loss" in bar[0]
    if width == 200:
        assert "400 samples/s" in bar[0]
        assert workers[1].endswith("there")


@pytest.mark.parametrize("width", WIDTHS)
def test_a_long_name_is_cut(width, tmp_path, monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    state_name = "a-very-long-name-of-a-run-that-somebody-has-chosen-1"
    first = EVENTS[0].__class__("run_started", 0.0, "driver", None, EVENTS[0].fields | {"run": state_name})
    lines = shown(width, [first, *EVENTS[1:]], tmp_path, state_name)
    assert sum("7/90" in line for line in lines) == 1


@pytest.mark.parametrize("width", WIDTHS)
def test_what_a_run_does_before_its_first_step(width, tmp_path, monkeypatch):
    """One line says it, and no bar stands there yet."""
    monkeypatch.setenv("TERM", "xterm-256color")
    for count, words in {1: "importing", 2: "opening", 9: "first batch"}.items():
        lines = [line for line in shown(width, EVENTS[:count], tmp_path) if line.startswith("mlp-1  ")]
        assert len(lines) == 1, lines
        assert words in lines[0]
        assert "ETA" not in lines[0]


@pytest.mark.parametrize("width", WIDTHS)
def test_notes_break_between_words(width, tmp_path, monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    reason = "nothing was heard of its process and of everything around it for a whole minute"
    died = Event("worker_died", 20.0, "driver", None, {"worker": "worker-1", "reason": reason})
    lines = shown(width, [*EVENTS, died], tmp_path)
    first = next(number for number, line in enumerate(lines) if "worker-1 died" in line)
    last = next(number for number, line in enumerate(lines) if line.endswith("minute"))
    assert " ".join(" ".join(lines[first : last + 1]).split()) == f"mlp-1: worker-1 died: {reason}"


@pytest.mark.parametrize("width", WIDTHS)
def test_metrics_servers_and_long_host_names_hold_their_lines(width, tmp_path, monkeypatch):
    """Bar, metrics, two workers, and a summary of the servers with a line each: nothing wraps."""
    monkeypatch.setenv("TERM", "xterm-256color")
    host = "a-host-with-a-long-name.cluster.example.org"
    started = Event("server_started", 30.0, "driver", None, {"server": "server-5", "pid": 7, "host": host})
    measured = {"split": "validation", "metrics": {f"metric_{n}": 0.5 for n in range(6)}}
    evaluated = Event("evaluated", 31.0, "worker-0", 7, measured)
    lines = shown(width, [*EVENTS, *SERVERS, started, evaluated], tmp_path)
    first = next(number for number, line in enumerate(lines) if "7/90" in line)
    panel = lines[first:]
    assert [line.split()[0] for line in panel[:7]] == [
        "mlp-1", "metric_0", "worker-0", "worker-1", "table", "server-3", "server-5",
    ]  # fmt: skip
    assert len(panel) == 7, panel
    assert [line.split()[1] for line in panel[5:]] == ["serving", "starting"]


@pytest.mark.parametrize("width", WIDTHS)
def test_a_search_has_a_line_for_each_trial(width, tmp_path):
    job = search_job()
    progress = progress_of(create(job, tmp_path), job, [StartedRow(), *WHOLE])
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(trial_table(progress, width))
    head, *lines = console.file.getvalue().splitlines()
    assert head.split()[:2] == ["trial", "accuracy"]
    assert head.split()[-1] == "values"
    assert len(lines) == min(len(Judge.of(job).ranked(progress.table)), MAX_TRIALS_SHOWN)
    assert all(line.split()[0].isdigit() for line in lines), lines
    assert ("workers" in head) == (width > 40)


@pytest.mark.parametrize("width", WIDTHS)
def test_a_list_of_runs_breaks_no_word(width):
    rows = [
        {
            "run": f"wide-and-deep-{n}",
            "status": "finished",
            "step": 1200,
            "steps": 1200,
            "metrics": {"loss": 0.25, "accuracy": 0.875},
            "started": "2024-03-01 12:00:00",
            "weights_sha256": "ab" * 32,
            "damage": "",
        }
        for n in range(2)
    ]
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    print_runs(console, rows)
    lines = console.file.getvalue().splitlines()
    assert [line.split()[:3] for line in lines if line.startswith("wide")] == [
        [f"wide-and-deep-{n}", "finished", "1200/1200"] for n in range(2)
    ]
    words = {"loss", "0.2500", "accuracy", "0.8750"} if width > 40 else set()
    found = " ".join(lines).split()
    assert words <= set(found)
    assert set(found) <= words | {
        *("run", "status", "step", "metrics", "started", "weights", "finished", "1200/1200", "abababababab"),
        *("wide-and-deep-0", "wide-and-deep-1", "2024-03-01", "12:00:00"),
    }
