"""The directory of a search: its job, its journal, its receipt, and a run for every trial."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from shoal.errors import error
from shoal.jobs import run_dir
from shoal.spec.job import Job
from shoal.spec.run_paths import RunPaths


@dataclass(frozen=True)
class SearchPaths:
    """A search is kept beside the runs. Its trials are runs below it: `digits-1/trial-7`."""

    run: RunPaths

    @property
    def name(self) -> str:
        return self.run.name

    @property
    def root(self) -> Path:
        return self.run.root

    @property
    def job(self) -> Path:
        return self.run.job

    @property
    def journal(self) -> Path:
        return self.run.search_journal

    @property
    def receipt(self) -> Path:
        return self.root / "search.json"

    @property
    def stop_request(self) -> Path:
        """A file that asks the driver to stop. The driver removes it."""
        return self.root / "search.stop"

    def trial(self, number: int) -> RunPaths:
        return RunPaths(self.root / f"trial-{number}")


def create(job: Job, runs: Path, *, reserved: RunPaths | None = None) -> SearchPaths:
    paths = SearchPaths(run_dir.create(job, runs, reserved=reserved))
    paths.journal.touch()
    return paths


def find(name: str, runs: Path) -> SearchPaths:
    """Find a search by its path, its name, or `last`. SH632 if it is a run."""
    if name == "last":
        found = [paths for paths in run_dir.list_runs(runs) if paths.search_journal.is_file()]
        if not found:
            raise error("SH632", f"there is no search in {runs}", where=name, fix="Start one: shoal search JOB.")
        return SearchPaths(found[-1])
    paths = run_dir.find(name, runs)
    if not paths.search_journal.is_file():
        raise error("SH632", f"'{paths.name}' is a run", where=name)
    return SearchPaths(paths)
