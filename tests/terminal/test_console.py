"""Text of others on the terminal: it is shown as text, whatever it contains."""

import json
import re

import pytest

from shoal.events.schema import KINDS
from shoal.terminal.console import json_line, make_console, printable
from tests.jobs.past_run import BUILT, FINISHED, TOLD, call_verb, write_run

FORBIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
EVIL = "\x1b[2J\x1b]0;owned\x07\x9b31m\x7f\u202egnp.exe\u2066 [red]loud[/red] [link=http://evil]here[/link] :skull: end"
SEEN = "[red]loud[/red] [link=http://evil]here[/link] :skull: end"


def test_what_a_terminal_acts_on_is_removed():
    assert printable(EVIL) == "[2J]0;owned31mgnp.exe " + SEEN
    assert printable("two\nlines\tand Ünïcode ⠿ 鱼") == "two\nlines\tand Ünïcode ⠿ 鱼"
    assert printable("half a pair: \ud800") == "half a pair: \N{REPLACEMENT CHARACTER}"


def test_every_control_character():
    kept = [code for code in range(0xA0) if printable(chr(code))]
    assert kept == [ord("\t"), ord("\n"), *range(0x20, 0x7F)]


def test_a_line_of_json_has_no_control_character():
    assert not FORBIDDEN.search(json_line({EVIL: "".join(map(chr, range(0x100))) + "\ud800"}))
    assert json.loads(json_line({"a": "\x7f"})) == {"a": "\x7f"}


def test_the_console_keeps_its_own_commands(capsys):
    console = make_console(width=80)
    console._force_terminal = True  # as in a terminal
    console._color_system = 1
    console.print(EVIL, style="bold")
    out = capsys.readouterr().out
    assert SEEN in out
    assert "\x1b[2J" not in out
    assert out.startswith("\x1b[1m"), "bold"


def evil_fields(kind):
    """The fields of a kind with the text where a text may be."""
    tried = (EVIL, [EVIL], {EVIL: EVIL}, {EVIL: 0.5}, {EVIL: 3}, {EVIL: [1]}, {EVIL: {}}, 3, 0.5, True, [], *PLANNED)
    return {name: next(value for value in tried if fits(kind, name, value)) for name in KINDS[kind].hints}


CHOICE = {"workers": 2, "hosts": 1, "threads": 1, "how": EVIL}
CANDIDATE = CHOICE | {"step_s": 0.5, "needs": [EVIL], "reason": EVIL}
PREDICTION = dict.fromkeys(("step_s", "compute_s", "encode_s", "exchange_s", "apply_s"), 0.5)
PLANNED = (CANDIDATE, CHOICE, PREDICTION, {"step_s": 0.5, "lane_s": [[0.1]]}, [CANDIDATE])


def fits(kind, name, value):
    return not KINDS[kind].wrong_fields({name: value})


EVIL_TOLD = [
    *TOLD[:-2],
    ("built", "worker-0", None, BUILT | {"device": EVIL, "samples": {EVIL: 3}}),
    *((kind, EVIL, 7, evil_fields(kind)) for kind in KINDS if KINDS[kind].in_stream and kind != "run_started"),
    ("run_started", "driver", None, {"run": EVIL, "listens": f"{EVIL}:80", "schema": 2}),
    ("joined", EVIL, 8, {"lanes": [0], "saves": True}),
    *(("step", EVIL, n, {"loss": 1.0, "samples": 3}) for n in (9, 10)),
    *(("evaluated", EVIL, n, {"split": "validation", "metrics": {EVIL: 0.5}}) for n in (9, 10)),
    ("finished", "worker-0", 60, FINISHED | {"metrics": {EVIL: 0.5}, "stopped": EVIL, "platform": {EVIL: EVIL}}),
    ("run_ended", "driver", None, {"status": EVIL}),
]


@pytest.fixture
def evil_run(tmp_path):
    paths = write_run(tmp_path / "runs" / f"{EVIL.replace('/', '')}-1", EVIL_TOLD)
    receipt = json.loads(paths.receipt.read_text())
    texts = dict.fromkeys(("run", "why", "weights_sha256", "stopped"), EVIL)
    lists = {"metrics": {EVIL: 0.5}, "best": {EVIL: 0.5, "step": 3}, "exact": False, "servers": 2}
    shares = {"carried": {name: {"host": EVIL, "samples": 3, "steps": 1} for name in (EVIL, "worker-1")}}
    paths.receipt.write_text(json.dumps(receipt | texts | lists | shares))
    write_run(tmp_path / "runs" / "mlp-2")
    return paths


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize("receipt", ["sound", "missing", "damaged"])
def test_no_reading_verb_passes_a_command_to_the_terminal(evil_run, capsys, monkeypatch, receipt, as_json):
    if receipt == "missing":
        evil_run.receipt.unlink()
    if receipt == "damaged":
        evil_run.receipt.write_text(json.dumps({"run": {EVIL: EVIL}, EVIL: 1}))
    monkeypatch.setenv("COLUMNS", "400")
    words = ["--runs", evil_run.root.parent, *(["--json"] if as_json else [])]
    for verb in (("runs",), ("show", evil_run.name), ("compare", evil_run.name, "mlp-2"), ("show", evil_run.root)):
        code, out, err = call_verb(capsys, monkeypatch, *verb, *words)
        assert (code, err) == (0, "")
        assert not FORBIDDEN.search(out), verb
        assert as_json or "[red]loud" in out, verb


@pytest.mark.parametrize(
    "verb", [("show",), ("resume",), ("stop",), ("token",), ("scale", "2"), ("drain", "0"), ("evaluate",)]
)
def test_errors_pass_no_command_to_the_terminal(evil_run, capsys, monkeypatch, verb):
    name, *rest = verb
    for run in (EVIL, evil_run.name):
        if (name, run) == ("show", evil_run.name):
            continue
        _, out, err = call_verb(capsys, monkeypatch, name, run, *rest, "--runs", evil_run.root.parent)
        assert "SH6" in err
        assert not FORBIDDEN.search(out + err)
        assert "[red]" in err
