"""python -m tools.web_screenshots: make the pictures of docs/web.md. Needs what `tools/install_browser.sh` installs.

Two real runs of the demo are trained in a temporary directory, the second with a worker that is killed; then a small
search, and a compression of the first run. Three jobs wait in a queue that nobody serves.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import yaml

from shoal.events import load_state
from shoal.jobs.queue import client
from shoal.spec.load import load_job
from shoal.spec.run_paths import RunPaths
from shoal.web.serve import WebServer

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
DESK: dict[str, Any] = {"viewport": {"width": 1280, "height": 820}, "color_scheme": "light"}
PHONE: dict[str, Any] = {"viewport": {"width": 360, "height": 720}, "color_scheme": "dark"}
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]
SEARCH = {
    "space": {
        "optimizer.args.lr": {"low": 1e-4, "high": 1e-1, "log": True},
        "model.args.hidden": {"low": 16, "high": 512, "log": True},
    },
    "metric": ["accuracy", "parameters"],
    "policy": {"kind": "promote", "sampler": "random", "first": 1},
    "budget": "8 trainings",
    "slots": 2,
}
PAGES = {
    "web-runs": "#/runs",
    "web-run": "#/run/digits-2",
    "web-workers": "#/run/digits-2?tab=workers",
    "web-timeline": "#/run/digits-2?tab=timeline",
    "web-receipt": "#/run/digits-2?tab=receipt",
    "web-logs": "#/run/digits-2?tab=logs&log=worker-0.log",
    "web-job": "#/run/digits-2?tab=job&with=digits-1",
    "web-compare": "#/compare?runs=digits-1,digits-2",
    "web-disk": "#/disk",
    "web-search": "#/searches/digits-3",
    "web-compression": "#/compressions/digits-compressed-1",
    "web-queue": "#/queue",
}


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        runs = Path(scratch) / "runs"
        shutil.copytree(ROOT / "examples" / "digits", Path(scratch) / "job")
        add_output(Path(scratch) / "job" / "model.py")
        train(Path(scratch) / "job", runs, kill_at=0)
        train(Path(scratch) / "job", runs, kill_at=150)
        search(Path(scratch) / "job", runs)
        compress(Path(scratch) / "job", runs)
        fill_queue(Path(scratch) / "job" / "job.yaml", runs)
        server = WebServer(runs, listen="127.0.0.1:0", say=lambda line: None)
        thread = threading.Thread(target=server.run_in_thread)
        thread.start()
        try:
            take_pictures(server)
        finally:
            server.stop()
            thread.join()


def add_output(code: Path) -> None:
    """For the part Logs: the demo prints nothing."""
    with code.open("a") as file:
        file.write("\nprint(Net())\n")


def train(job: Path, runs: Path, *, kill_at: int) -> None:
    """Train on two workers; kill one of them at a step, if asked to."""
    words = [sys.executable, "-m", "shoal", "run", "job.yaml", "--runs", str(runs), "--workers", "2", "--quiet"]
    driver = subprocess.Popen(words, cwd=job, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL)
    paths = RunPaths(runs / f"digits-{2 if kill_at else 1}")
    while kill_at and driver.poll() is None:
        state = load_state(paths.events, paths.state_snapshot) if paths.events.exists() else None
        if state is not None and state.step >= kill_at and state.training_workers:
            os.kill(state.training_workers[-1].pid, signal.SIGKILL)
            break
        time.sleep(0.05)
    driver.wait()


def search(job: Path, runs: Path) -> None:
    """Twelve trainings' worth of trials, for accuracy and few parameters."""
    content = yaml.safe_load((job / "job.yaml").read_text()) | {"epochs": 6, "search": SEARCH}
    (job / "search.yaml").write_text(yaml.safe_dump(content))
    words = [sys.executable, "-m", "shoal", "search", "search.yaml", "--runs", str(runs), "--workers", "2", "--quiet"]
    subprocess.run(words, cwd=job, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL, check=True)


def compress(job: Path, runs: Path) -> None:
    words = [sys.executable, "-m", "shoal", "compress", "digits-1", "--runs", str(runs), "--target", "size<50%"]
    words += ["--max-drop", "5%"]
    subprocess.run(words, cwd=job, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL, check=True)


def fill_queue(job_file: Path, runs: Path) -> None:
    job = load_job(job_file)
    first = client.submit([job], runs=runs, user="ann", start=False)[0]
    client.submit([job], runs=runs, user="ben", priority=5, start=False)
    client.submit([job], runs=runs, user="ann", after=[first.id], start=False)


def take_pictures(server: WebServer) -> None:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=FLAGS)
        for options, pages in ((DESK, PAGES), (PHONE, {"web-phone": "#/run/digits-2"})):
            page = browser.new_context(**options).new_page()
            page.goto(server.link())
            page.locator("table.runs a").first.wait_for()
            for name, address in pages.items():
                _take(page, f"{server.url}/{address}", name)
        browser.close()


def _take(page: Any, address: str, name: str) -> None:
    page.goto(address)
    page.wait_for_load_state("load")
    page.locator("h1").first.wait_for()
    page.wait_for_timeout(2500)
    page.screenshot(path=DOCS / f"{name}.png")


if __name__ == "__main__":
    main()
