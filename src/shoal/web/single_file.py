"""A run as one HTML file that opens from disk: the page's own modules and the run's answers, all inside."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path

from shoal.events import load_state
from shoal.jobs import run_dir
from shoal.spec.alerts.config import hide_webhooks
from shoal.spec.receipt import read_receipt_file
from shoal.spec.run_paths import RunPaths, write_atomically
from shoal.storage import logs
from shoal.storage.history import RunHistory
from shoal.web import answers
from shoal.web.app import static_files
from shoal.web.reading import SeriesQuery, make_run_page, make_series_page, make_timeline
from shoal.web.table import encode_json

POINTS = 2000
TAIL_LINES = 500
BINS = 160
REPLACED = {"api.js": "file_api.js", "main.js": "file_main.js"}
"""Modules that ask the server, and what stands for them in a file."""
_IMPORT = re.compile(r"""(from\s*)["']\./(?:vendor/)?([\w.]+)["']""")


def export_html(paths: RunPaths, target: Path) -> None:
    """Write the file. Its curves have at most `POINTS` bins, which keep every extreme."""
    write_atomically(target, make_page(paths))


def make_page(paths: RunPaths) -> str:
    files = static_files()
    style = "\n".join(files[name].content.decode() for name in ("vendor/uplot.css", "style.css"))
    modules = {Path(name).name: files[name].content.decode() for name in files if name.endswith(".js")}
    imports = {f"shoal/{name}": _data_url(REPLACED.get(name, name), modules) for name in modules}
    data = encode_json({"name": paths.name, "answers": collect(paths)}).decode().replace("<", "\\u003c")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        "<meta http-equiv=\"content-security-policy\" content=\"default-src 'none'; script-src 'unsafe-inline' data:; "
        "style-src 'unsafe-inline'; img-src data:\">"
        f"<title>{_escaped(paths.name)}</title>\n<style>{style}</style>\n"
        f'<script type="importmap">{json.dumps({"imports": imports})}</script>\n'
        f'<script type="application/json" id="data">{data}</script>\n'
        '<script type="module">import "shoal/main.js";</script></head><body><div id="app"></div></body></html>\n'
    )


def _data_url(name: str, modules: dict[str, str]) -> str:
    """A module with relative imports would not find its neighbours in a data URL: they get names in the import map."""
    source = _IMPORT.sub(r'\1"shoal/\2"', modules[name])
    return "data:text/javascript;base64," + base64.b64encode(source.encode()).decode()


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;")


def collect(paths: RunPaths) -> dict[str, object]:
    """The answers that the page asks for, by path."""
    with run_dir.readable(paths):
        state = load_state(paths.events, paths.state_snapshot)
        history = RunHistory(paths)
        history.catch_up()
    query = SeriesQuery(points=POINTS)
    series = [make_series_page(name, one, query) for name, one in sorted(history.series.items())]
    stored = read_receipt_file(paths.receipt)
    receipt = stored.found.model_dump(mode="python") if stored.found else None
    found: dict[str, answers.Answer] = {
        "": make_run_page(paths, state, run=paths.name, tags=[], offset=0),
        "/series": answers.SeriesList(run=paths.name, step=history.step, names=sorted(history.series), series=series),
        "/timeline": make_timeline(history, bins=BINS),
        "/receipt": answers.ReceiptAnswer(receipt=receipt, damage=stored.damage),
        "/job": answers.JobText(run=paths.name, yaml=hide_webhooks(paths.job.read_text(errors="replace"))),
    }
    every: dict[str, object] = {name: one.model_dump(mode="python") for name, one in found.items()}
    listed = logs.list_logs(paths)
    every["/logs"] = [one._asdict() for one in listed]
    for one in listed:
        every[f"/logs/{one.name}"] = {"name": one.name, **logs.read_tail(paths, one.name, lines=TAIL_LINES)._asdict()}
    return every
