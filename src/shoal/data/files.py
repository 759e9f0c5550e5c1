"""Find data files: a path, glob, directory or URL becomes a list of files. Remote files are copied to a cache."""

from __future__ import annotations

import contextlib
import glob
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoal.data.cache import cached_directory
from shoal.data.source import SourceOptions
from shoal.errors import ShoalError, closest_name, error

_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs", "http": "http", "https": "http",
           "sftp": "sftp", "ssh": "sftp"}  # fmt: skip
_VERSION_KEYS = ("ETag", "etag", "mtime", "LastModified", "last_modified", "updated", "created")


@dataclass(frozen=True)
class DataFile:
    """An existing file. `stamp` changes when the content changes; `fs` is None for a local file."""

    path: str
    size_bytes: int
    version: str
    fs: Any = field(default=None, compare=False, repr=False)

    @property
    def cache_key(self) -> list[str | int]:
        return [self.path, self.size_bytes, self.version]


def is_url(path: str) -> bool:
    return "://" in path


def absolute_path(path: str, base_dir: str) -> str:
    """A local path, relative to the job file's directory."""
    return os.path.abspath(os.path.join(base_dir, os.path.expanduser(path)))


def find_files(path: str, *, options: SourceOptions, suffixes: tuple[str, ...]) -> list[DataFile]:
    """The files of a path, glob, directory or URL, sorted: at least one, and none is empty."""
    if is_url(path):
        found = _find_remote(path, suffixes)
    else:
        found = _find_local(absolute_path(path, options.base_dir), suffixes)
    if not found:
        raise error("SH301", f"no files match: {path}", where=path)
    for file in found:
        if file.size_bytes == 0:
            raise error("SH302", "the file is empty", where=file.path)
    return found


def find_file(path: str, *, options: SourceOptions) -> str:
    """One file as a local path. A remote file is copied into the cache once."""
    found = find_files(path, options=options, suffixes=("",))
    if len(found) != 1:
        raise error("SH301", f"one file is expected, but {len(found)} match", where=path)
    return local_path(found[0], options=options)


def local_path(file: DataFile, *, options: SourceOptions) -> str:
    """The file itself, or its copy in the cache."""
    if file.fs is None:
        return file.path
    name = file.path.rsplit("/", 1)[-1]

    def copy(directory: Path) -> None:
        options.notify(f"copying {file.path} into the cache")
        with wrap_file_errors(file.path):
            file.fs.get_file(_without_protocol(file), str(directory / name))

    return str(cached_directory(options.cache_dir, ["copy", *file.cache_key], copy) / name)


def ensure_seekable(file: DataFile, *, options: SourceOptions) -> DataFile:
    """The file if ranges of it can be read; otherwise its copy in the cache: not every server supports ranges."""
    if file.fs is None:
        return file
    if file.size_bytes > 0:
        with wrap_file_errors(file.path), contextlib.suppress(ValueError, NotImplementedError):  # no ranges
            with file.fs.open(file.path, "rb") as raw:
                raw.seek(file.size_bytes - 1)
                raw.read(1)
            return file
    return _stat_local(local_path(file, options=options))


@contextmanager
def wrap_file_errors(url: str) -> Iterator[None]:
    """Turn any exception of a file system into an error with a fix."""
    try:
        yield
    except ShoalError:
        raise
    except FileNotFoundError as failure:
        raise error("SH301", f"no such file: {url}", where=url) from failure
    except ImportError as failure:
        raise _missing_package(url, failure) from failure
    except Exception as failure:  # file systems raise the exceptions of their client libraries
        raise error("SH308", f"{type(failure).__name__}: {failure}", where=url) from failure


def _missing_package(url: str, failure: ImportError) -> ShoalError:
    protocol = url.split("://", 1)[0]
    extra = _EXTRAS.get(protocol)
    fix = f"pip install 'shoal[{extra}]'" if extra else f"Install the fsspec package for {protocol}://."
    return error("SH207", f"{protocol}:// needs a package: {failure}", where=url, fix=fix)


def _without_protocol(file: DataFile) -> str:
    return str(file.fs._strip_protocol(file.path))


# ---- local ----


def _find_local(path: str, suffixes: tuple[str, ...]) -> list[DataFile]:
    if os.path.isdir(path):
        return [_stat_local(p) for p in _walk(path, suffixes)]
    if os.path.exists(path):
        return [_stat_local(path)]
    if glob.has_magic(path):
        return [_stat_local(p) for p in sorted(glob.glob(path, recursive=True)) if os.path.isfile(p)]
    raise _not_found(path)


def _walk(directory: str, suffixes: tuple[str, ...]) -> list[str]:
    found = (os.path.join(root, name) for root, _, names in os.walk(directory) for name in names)
    return sorted(path for path in found if _is_data_file(path, suffixes))


def _is_data_file(path: str, suffixes: tuple[str, ...]) -> bool:
    """False for files such as `_SUCCESS` and `.part.crc`, which tools write for themselves."""
    name = path.rsplit("/", 1)[-1]
    return not name.startswith(("_", ".")) and name.lower().endswith(suffixes)


def _stat_local(path: str) -> DataFile:
    try:
        stat = os.stat(path)
        with open(path, "rb"):
            return DataFile(path, stat.st_size, str(stat.st_mtime_ns))
    except OSError as failure:
        raise error("SH308", f"cannot be read: {failure.strerror}", where=path,
                    fix="Give the file read permission.") from failure  # fmt: skip


def _not_found(path: str) -> ShoalError:
    parent, name = os.path.split(path)
    if not os.path.isdir(parent):
        return error("SH301", f"the directory {parent} does not exist", where=path)
    close = closest_name(name, os.listdir(parent))
    return error("SH301", f"no such file: {path}", where=path, fix=f"Did you mean '{close}'?" if close else "")


# ---- remote ----


def _find_remote(url: str, suffixes: tuple[str, ...]) -> list[DataFile]:
    with wrap_file_errors(url):
        fs, path = _file_system(url)
        if "local" in (fs.protocol if isinstance(fs.protocol, tuple) else (fs.protocol,)):
            return _find_local(path, suffixes)
        if glob.has_magic(path) and not fs.exists(path):
            names = sorted(fs.glob(path))
        elif fs.isdir(path):
            names = sorted(name for name in fs.find(path) if _is_data_file(name, suffixes))
        else:
            names = [path]
        return [_stat_remote(fs, name) for name in names]


def _file_system(url: str) -> tuple[Any, str]:
    import fsspec

    try:
        fs, path = fsspec.core.url_to_fs(url)
    except ValueError as failure:  # fsspec does not know the protocol
        raise ImportError(str(failure)) from failure
    return fs, str(path)


def _stat_remote(fs: Any, path: str) -> DataFile:
    info = fs.info(path)
    stamp = next((str(info[key]) for key in _VERSION_KEYS if info.get(key)), "")
    # An HTTP server may not report a size: then the file is copied, and an empty copy fails to parse.
    size = info.get("size")
    return DataFile(fs.unstrip_protocol(path), -1 if size is None else int(size), stamp, fs)
