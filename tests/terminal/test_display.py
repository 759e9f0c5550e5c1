"""What a person sees of many workers."""

import io

from shoal.events import Event, replay
from shoal.events.schema import LANES_MOVE
from shoal.spec.receipt import Receipt, WorkerContribution
from shoal.spec.run_paths import RunPaths
from shoal.terminal import reports
from shoal.terminal.console import make_console
from shoal.terminal.live import LiveDisplay, PlainDisplay, _panel
from shoal.terminal.notes import event_line, join_hint


def make_events(*rows):
    """Rows of (who, kind, step, fields)."""
    return [Event(kind, float(i), who, step, fields) for i, (who, kind, step, fields) in enumerate(rows)]


BUILT = {"steps": 90, "steps_per_epoch": 9, "lanes": 4, "samples": {}, "skipped": 0, "parameters": 1, "device": "cpu"}
EVENTS = make_events(
    ("driver", "run_started", None, {"run": "mlp-1", "pid": 1, "listens": "10.0.0.5:4000"}),
    ("worker-0", "worker_started", None, {"host": "here", "pid": 2}),
    ("worker-1", "worker_started", None, {"host": "there", "pid": 3}),
    ("worker-2", "worker_started", None, {"host": "here", "pid": 4}),
    ("worker-0", "built", None, BUILT),
    ("worker-1", "built", None, BUILT),
    ("worker-0", "joined", 0, {"view": 1, "lanes": [0, 1], "saves": True}),
    ("worker-1", "joined", 0, {"view": 1, "lanes": [2, 3], "saves": False}),
    ("worker-2", "joined", 0, {"view": 1, "lanes": [], "saves": False}),
    ("worker-0", "step", 7, {"samples": 10, "wall_s": 0.1, "loss": 0.5}),
    ("worker-1", "step", 6, {"samples": 30, "wall_s": 0.1, "loss": 0.5}),
    ("driver", "worker_died", None, {"worker": "worker-2", "reason": "SIGKILL"}),
)


def printed(something, width=120):
    console = make_console(file=io.StringIO(), width=width)
    console.print(something)
    return console.file.getvalue()


def test_each_worker_that_is_there_has_a_line():
    lines = [" ".join(line.split()) for line in printed(_panel(replay(EVENTS))).splitlines()]
    assert "worker-0 training lanes 0-1 step 7 100 samples/s saves here" in lines
    assert "worker-1 training lanes 2-3 step 6 300 samples/s there" in lines
    assert not any("worker-2" in line for line in lines)
    assert "400 samples/s" in lines[0]


def remarks(events):
    state, found = replay([]), []
    for event in events:
        state.apply(event)
        if text := event_line(event, state):
            found.append(text)
    return found


def test_what_all_workers_tell_alike_is_shown_once():
    shown = remarks(EVENTS)
    assert sum(text.startswith("1 parameter, ") for text in shown) == 1
    assert shown[-1] == "worker-2 died: SIGKILL"


def test_a_model_that_is_never_whole_is_not_counted():
    built = {name: value for name, value in BUILT.items() if name != "parameters"}
    (shown,) = remarks(make_events(("worker-0", "built", None, built)))
    assert shown.startswith("samples: ")


def test_views_without_a_reason_are_not_shown():
    views = make_events(
        ("driver", "view", None, {"number": 1, "why": "worker-2 is gone"}),
        ("driver", "view", None, {"number": 2, "why": "", "carries": {"worker-0": [0]}}),
        ("worker-0", "stopped", 3, {"view": 1, "why": "worker-2 is gone"}),
        ("driver", "view", None, {"number": 3, "why": "finished"}),
        ("worker-0", "left", 3, {"why": "finished"}),
    )
    assert remarks(views) == ["worker-2 is gone"]


def test_how_to_join_is_shown_where_others_can():
    line = "join with: SHOAL_TOKEN=$(shoal token mlp-1) shoal join 10.0.0.5:4000 --trust-code"
    assert remarks(EVENTS)[0] == line == join_hint("mlp-1", "10.0.0.5:4000")
    assert join_hint("a-1", "[fe80::1]:4000").endswith("shoal join [fe80::1]:4000 --trust-code")
    assert join_hint("mlp-1", "10.0.0.5:4000", tls=True) == line.replace(" --trust", " --tls DIR --trust")
    for near in ("127.0.0.1:4000", "127.0.0.2:1", "[::1]:4000", ""):
        assert join_hint("a-1", near) == ""


def test_the_live_display_survives_hundreds_of_workers():
    rows = [(f"worker-{n}", "joined", 0, {"view": 1, "lanes": [n], "saves": n == 0}) for n in range(300)]
    state = replay(make_events(*rows))
    shown = printed(_panel(state))
    assert "and 284 more" in shown
    assert len(shown.splitlines()) < 30
    LiveDisplay(make_console(file=io.StringIO()))


HELD = {
    "server-3": {"primary_bytes": 3000, "backup_bytes": 1000},
    "server-4": {"primary_bytes": 1000, "backup_bytes": 3000},
}
MOVING = {"server-3": {"primary_bytes": 4000}, "server-5": {"filling_bytes": 4000}}
LITTLE = {"pushes": 10, "staleness_mean": 0.0, "staleness_max": 1}
MUCH = {
    "pushes": 30,
    "staleness_mean": 2.0,
    "staleness_max": 4,
    "bytes_in": 5000,
    "bytes_out": 7000,
    "bytes_plain": 9000,
}
SERVERS = make_events(
    ("driver", "servers_wanted", None, {"number": 2, "why": ""}),
    ("driver", "server_started", None, {"server": "server-3", "pid": 5, "host": "here"}),
    ("driver", "server_started", None, {"server": "server-4", "pid": 6, "host": "here"}),
    ("driver", "chunk_table", None, {"number": 1, "why": "", "servers": HELD}),
    ("driver", "server_stats", None, {"server": "server-3", "stats": MUCH}),
    ("driver", "server_stats", None, {"server": "server-4", "stats": LITTLE}),
    ("driver", "server_died", None, {"server": "server-4", "reason": "SIGKILL"}),
    ("driver", "chunk_table", None, {"number": 2, "why": "server-4 is gone", "failovers": 1, "servers": MOVING}),
)


def test_servers_are_shown_and_what_they_hold():
    state = replay([*EVENTS, *SERVERS])
    lines = [" ".join(line.split()) for line in printed(_panel(state)).splitlines()]
    assert "server-3 serving 4.0 kB primary 0 B backup 30 pushes, 5.0 kB in, 7.0 kB out here" in lines
    assert "server-5 filling 0 B primary 0 B backup, 4.0 kB on the way" in lines
    assert not any(line.startswith("server-4") for line in lines)
    summary = "table 2, 1 of 2 servers serve, 1 died, 1 failover, staleness 1.50 on average, 4 at most"
    assert f"{summary}, 4.0 kB saved by the codec" in lines
    console = make_console(file=io.StringIO(), width=160)
    reports.print_run(console, state, width=160)
    assert summary in console.file.getvalue()
    assert "server-3  serving" in console.file.getvalue()
    assert (state.peak_servers, state.server_deaths, state.deaths) == (2, 1, 1)


def test_show_tells_where_workers_of_a_live_run_are():
    console = make_console(file=io.StringIO(), width=60)
    reports.print_run(console, replay(EVENTS), width=60)
    lines = [" ".join(line.split()) for line in console.file.getvalue().splitlines()]
    assert "worker-0 training pid 2 on here step 7" in lines
    assert "worker-1 training pid 3 on there step 6" in lines
    assert not any("worker-2 " in line and "pid" in line for line in lines)


def test_of_servers_only_what_matters_has_a_line():
    assert remarks(SERVERS) == ["server-4 died: SIGKILL"]


def test_the_receipt_says_who_carried_how_much():
    carried = {
        f"worker-{n}": WorkerContribution(host="here", lanes=[n], steps=10, samples=10 * n, work_s=1.5)
        for n in range(20)
    }
    receipt = Receipt(
        run="a-1", job_sha256="", exact=True, weights_sha256="", state_sha256="", steps=10, epochs=1.0,
        samples_seen=1900, parameters=5, workers=20, lanes=20, carried=carried,
    )  # fmt: skip
    console = make_console(file=io.StringIO(), width=120)
    reports.print_receipt(console, receipt)
    lines = [" ".join(line.split()) for line in console.file.getvalue().splitlines()]
    assert "worker-19 10% 190 samples 10 steps 1.5 s of work here" in lines
    assert "8 others 15% 280 samples" in lines


def test_the_receipt_says_what_became_of_the_servers():
    receipt = Receipt(
        run="a-1", job_sha256="", exact=False, weights_sha256="", state_sha256="", steps=10, epochs=1.0, samples_seen=1,
        parameters=5, workers=1, lanes=1, servers=2, server_deaths_survived=1, staleness_mean=1.25, staleness_max=4,
    )  # fmt: skip
    console = make_console(file=io.StringIO(), width=120)
    reports.print_receipt(console, receipt)
    assert "2 servers, 1 death survived, staleness 1.25 on average, 4 at most" in console.file.getvalue()


def test_what_every_worker_says_is_shown_once():
    """And what was said in between is not said again in its place."""
    notes = [("worker-0", "agree"), ("worker-1", "other"), ("worker-1", "agree"), ("worker-2", "agree")]
    shown = remarks(make_events(*((who, "note", None, {"message": text}) for who, text in notes)))
    assert shown == ["agree", "other"]
    loaded = {"path": "a-1", "loaded": 4, "tensors": 4}
    shown = remarks(make_events(*((f"worker-{n}", "weights_loaded", None, loaded) for n in range(3))))
    assert shown == ["initialised from a-1: 4 of 4 tensors"]


def test_that_lanes_move_is_said_once():
    """Each of them is in the stream; other reasons are said every time."""
    reasons = [LANES_MOVE, "worker-1 joins", LANES_MOVE, "worker-1 joins", LANES_MOVE]
    events = make_events(*(("driver", "view", None, {"number": n, "why": why}) for n, why in enumerate(reasons)))
    assert remarks(events) == [LANES_MOVE, "worker-1 joins", "worker-1 joins"]


def test_plain_lines_say_what_a_start_does(tmp_path):
    console, state = make_console(file=io.StringIO(), width=80), replay([])
    display = PlainDisplay(console)
    for event in EVENTS:
        state.apply(event)
        display.on_event(RunPaths(tmp_path / "mlp-1"), event, state)
    lines = [line.removeprefix("mlp-1: ").split()[0] for line in console.file.getvalue().splitlines()]
    assert lines == ["importing", "join", "opening", "1", "computing", "step", "worker-2"]


def test_a_resumed_run_tells_its_start_too():
    again = make_events(("driver", "run_started", None, EVENTS[0].fields), ("worker-3", "worker_started", None, {}))
    assert replay([*EVENTS, *again[:1]]).stage == "importing"
    assert replay([*EVENTS, *again]).stage == "opening data"
    assert replay(EVENTS).stage == ""


def test_one_of_a_thing_is_singular():
    built = BUILT | {"steps": 1, "lanes": 1, "skipped": 1, "samples": {"train": 9}}
    (shown,) = remarks(make_events(("worker-0", "built", None, built)))
    assert shown == "1 parameter, samples: 9 train, 1 bad row skipped; 1 step, 1 lane, cpu"
