"""Check that the files that a job names exist. Relative paths start at `base_dir`."""

from __future__ import annotations

import glob
from collections.abc import Iterator
from pathlib import Path

from shoal.errors import ShoalError, error, suggest_path
from shoal.spec.certificates import tls_contexts_for
from shoal.spec.data import BalancedSamplerConfig
from shoal.spec.job import Job
from shoal.spec.sources.config import IdxSourceConfig, NpySourceConfig, PythonSourceConfig, SourceConfig


def check_files(job: Job) -> list[ShoalError]:
    """An error for each local file that does not exist. URLs are checked when the data is opened."""
    base = Path(job.base_dir)
    if not base.is_dir():
        return [error("SH301", f"there is no directory {base}", where="base_dir")]
    local = [(field, path) for field, path in _named_paths(job) if "://" not in path]
    return [*filter(None, (_check_file(base, field, path) for field, path in local)), *_check_certificates(job)]


def _check_file(base: Path, field: str, path: str) -> ShoalError | None:
    try:
        if _exists(base / path):
            return None
        return error("SH301", f"no such file: {path}", where=field, fix=suggest_path(base / path))
    except OSError as failure:  # a name that is too long, or a directory that may not be entered
        return error("SH301", f"{failure.strerror}: {path:.100}", where=field)


def _check_certificates(job: Job) -> list[ShoalError]:
    try:
        tls_contexts_for(job)
    except ShoalError as failure:
        return [failure]
    return []


def _named_paths(job: Job) -> Iterator[tuple[str, str]]:
    data = job.data
    for part, source in (("source", data.source), ("validation", data.validation), ("test", data.test)):
        if source is not None:
            yield from ((f"data.{part}.{field}", path) for field, path in _source_paths(source))
    if isinstance(data.sampler, BalancedSamplerConfig) and data.sampler.by.endswith(".npy"):
        yield "data.sampler.by", data.sampler.by
    # A bare word may be the name of a run. Only the driver knows where runs are stored.
    if job.init_from and job.init_from.path and ("/" in job.init_from.path or "." in job.init_from.path):
        yield "init_from.path", job.init_from.path


def _source_paths(source: SourceConfig) -> Iterator[tuple[str, str]]:
    path = getattr(source, "path", None)
    if path is not None and not isinstance(source, PythonSourceConfig):
        yield "path", path
    if isinstance(source, NpySourceConfig | IdxSourceConfig) and source.target:
        yield "target", source.target


def _exists(path: Path) -> bool:
    return path.exists() or any(True for _ in glob.iglob(str(path), recursive=True))
