"""The numbers of the web page in the documentation are those that were kept."""

import json
import re

import pytest

from tests.docs.pages import ROOT

KEPT = json.loads((ROOT / "benchmarks" / "results" / "web.json").read_text())
TABLES = (ROOT / "docs" / "benchmarks.md").read_text().partition("## The web page")[2].partition("\n## ")[0]


def row(part, **fields):
    """The row of a part with these fields."""
    (found,) = [one for one in KEPT[part]["rows"] if all(one.get(name) == value for name, value in fields.items())]
    return found


def wall(part, what):
    return f"{row(part, what=what)['wall s']} s"


def documented(beginning):
    """The cells of the row of the documentation that begins so."""
    lines = [line for line in TABLES.splitlines() if line.startswith(f"| {beginning}")]
    assert len(lines) == 1, beginning
    return lines[0].strip("| ").split(" | ")


START, IDLE = row("start", what="start to first byte"), row("start", what="idle")
FIRST, AGAIN = row("points", what="first question: reads all events"), row("points", what="the next")
ZOOM, USAGE = row("points", what="a zoom"), KEPT["usage"]["rows"][0]
COSTS = {
    "start to the first byte": wall("start", "start to first byte"),
    "memory when idle": f"{IDLE['server MB']} MB",
    "the whole page": f"{START['kB']} kB",
    "first question about a run of 1,000,000": f"{FIRST['wall s']} s, at most {FIRST['peak MB']} MB",
    "the same curve again": f"{AGAIN['wall s']} s, {AGAIN['kB']} kB",
    "a zoom into it": f"{ZOOM['wall s']} s, {ZOOM['kB']} kB",
    "the same curve from a new server": wall("points", "first question of a new server"),
    "list of 10,000 runs without snapshots": wall("runs", "list, cold"),
    "the list again": f"{wall('runs', 'list, warm')}; {wall('runs', 'filter and sort')}",
    "what 10,000 runs occupy": wall("runs", "disk use"),
    "from a row written to its message": wall("start", "row written to message"),
    "from a row written to its pixel": f"{KEPT['pixel']['rows'][0]['p95 s']} s",
    "Ctrl-C": wall("start", "Ctrl-C with an open stream"),
    "what a worker spends": (
        f"{USAGE['cpu us each']:.0f} µs of processor time every 2 s: {USAGE['% of a core']} % of a core"
    ),
}


@pytest.mark.parametrize("beginning", COSTS)
def test_costs_are_those_that_were_kept(beginning):
    assert documented(beginning)[-1] == COSTS[beginning]


def test_a_sample_of_usage_costs_the_same_on_every_page():
    told = f"A sample takes {USAGE['cpu us each']:.0f} µs of CPU time: {USAGE['% of a core']} % of a core"
    assert told in " ".join((ROOT / "docs" / "web.md").read_text().split())


@pytest.mark.parametrize(
    ("kept", "told"), [("nothing", "nobody looks"), ("stream", "of the stream"), ("page", "Chromium")]
)
def test_following_costs_what_was_kept(kept, told):
    share = row("following", open=kept)["server, % of a core"]
    text = " ".join(TABLES.partition("What an open page costs")[2].partition("| open")[0].split())
    digits = len(re.search(rf"([\d.]+) %[^%]*{told}", text)[1].partition(".")[2])
    assert f"{share:.{digits}f} %" in text


@pytest.mark.parametrize("workers", [1, 2])
def test_who_looks_at_a_run_does_not_slow_it(workers):
    """At most half a per cent, also one and a half standard errors above what was found."""
    found = row("training", workers=workers)
    assert found["slowed %"] + 1.5 * found["± %"] <= 0.5


@pytest.mark.parametrize(("part", "beginning"), [("training", "a reader"), ("browser", "a page in Chromium")])
def test_an_open_page_costs_what_was_kept(part, beginning):
    lines = [line for line in TABLES.splitlines() if line.startswith(f"| {beginning}")]
    for line, one in zip(lines, KEPT[part]["rows"], strict=True):
        slower, cpu = f"{one['slowed %']} % ± {one['± %']} %", f"{one['cpu per step, + %']:+} % ± {one['± % of it']} %"
        expected = [str(one["workers"]), slower, cpu, f"{one['server, % of a core']} %"]
        assert line.strip("| ").split(" | ")[1:] == [cell.replace("-", "−") for cell in expected]


@pytest.mark.parametrize(
    ("part", "table"), [("rivals runs", "10,000 runs"), ("rivals points", "one run"), ("rivals overlay", "100 runs")]
)
def test_other_tools_are_shown_as_they_were_measured(part, table):
    lines = TABLES.partition(f"| {table}")[2].splitlines()[2:6]
    names = {"shoal": "Shoal", "tensorboard": "TensorBoard", "mlflow": "MLflow", "trackio": "trackio"}
    for one in KEPT[part]["rows"]:
        (line,) = [line for line in lines if line.startswith(f"| {names[one['tool']]}")]
        curve = one["first curve s"]
        shown = "not in 60 s" if curve == "never" else f"{curve:.1f} s"
        cells = line.strip("| ").split(" | ")
        assert cells[1:4] == [f"{one['first row s']:.1f} s", shown, f"{one['received MB']:.1f} MB"]
        assert cells[4] == f"{one['server MB']:,.0f} MB"


def test_never_means_the_patience_of_the_benchmark():
    source = (ROOT / "benchmarks" / "web" / "rivals.py").read_text()
    patience_s = re.search(r"^PATIENCE_S = (\d+)", source, re.MULTILINE)[1]
    assert f"`never` is longer than {patience_s} s" in " ".join((ROOT / "benchmarks" / "README.md").read_text().split())
