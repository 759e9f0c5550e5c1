"""Where data files are: a path, glob, directory or URL to a list of files, and remote files to local ones."""

from __future__ import annotations

import contextlib
import glob
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoal.data.cache import cached
from shoal.data.source import Opening
from shoal.errors import ShoalError, error, nearest

_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs", "http": "http", "https": "http",
           "sftp": "sftp", "ssh": "sftp"}  # fmt: skip
_STAMPS = ("ETag", "etag", "mtime", "LastModified", "last_modified", "updated", "created")


@dataclass(frozen=True)
class File:
    """A file that was there. `stamp` changes when the content does; `fs` is None for a local one."""

    path: str
    size_bytes: int
    stamp: str
    fs: Any = field(default=None, compare=False, repr=False)

    @property
    def identity(self) -> list[str | int]:
        return [self.path, self.size_bytes, self.stamp]


def is_url(path: str) -> bool:
    return "://" in path


def absolute(path: str, base_dir: str) -> str:
    """A local path as the job file means it."""
    return os.path.abspath(os.path.join(base_dir, os.path.expanduser(path)))


def find_files(path: str, *, opening: Opening, suffixes: tuple[str, ...]) -> list[File]:
    """The files of a path, glob, directory or URL, in sorted order; at least one, none of them empty."""
    if is_url(path):
        found = _find_remote(path, suffixes)
    else:
        found = _find_local(absolute(path, opening.base_dir), suffixes)
    if not found:
        raise error("SH301", f"no files match: {path}", where=path)
    for file in found:
        if file.size_bytes == 0:
            raise error("SH302", "the file is empty", where=file.path)
    return found


def find_file(path: str, *, opening: Opening) -> str:
    """One file as a local path; a remote one is copied into the cache once."""
    found = find_files(path, opening=opening, suffixes=("",))
    if len(found) != 1:
        raise error("SH301", f"one file is wanted, {len(found)} are there", where=path)
    return local_path(found[0], opening=opening)


def local_path(file: File, *, opening: Opening) -> str:
    """The file itself, or its copy in the cache."""
    if file.fs is None:
        return file.path
    name = file.path.rsplit("/", 1)[-1]

    def copy(directory: Path) -> None:
        opening.tell(f"copying {file.path} into the cache")
        with reaching(file.path):
            file.fs.get_file(_bare(file), str(directory / name))

    return str(cached(opening.cache_dir, ["copy", *file.identity], copy) / name)


def seekable(file: File, *, opening: Opening) -> File:
    """The file if parts of it can be read, else its copy in the cache: not every server answers for ranges."""
    if file.fs is None:
        return file
    if file.size_bytes > 0:
        with reaching(file.path), contextlib.suppress(ValueError, NotImplementedError):  # a refusal of ranges
            with file.fs.open(file.path, "rb") as raw:
                raw.seek(file.size_bytes - 1)
                raw.read(1)
            return file
    return _local(local_path(file, opening=opening))


@contextmanager
def reaching(url: str) -> Iterator[None]:
    """Whatever a file system raises, as an error that says what to do."""
    try:
        yield
    except ShoalError:
        raise
    except FileNotFoundError as failure:
        raise error("SH301", f"no such file: {url}", where=url) from failure
    except ImportError as failure:
        raise _no_package(url, failure) from failure
    except Exception as failure:  # file systems raise what their client libraries raise
        raise error("SH308", f"{type(failure).__name__}: {failure}", where=url) from failure


def _no_package(url: str, failure: ImportError) -> ShoalError:
    protocol = url.split("://", 1)[0]
    extra = _EXTRAS.get(protocol)
    fix = f"pip install 'shoal[{extra}]'" if extra else f"Install the fsspec package for {protocol}://."
    return error("SH207", f"{protocol}:// needs a package: {failure}", where=url, fix=fix)


def _bare(file: File) -> str:
    return str(file.fs._strip_protocol(file.path))


# ---- local ----


def _find_local(path: str, suffixes: tuple[str, ...]) -> list[File]:
    if os.path.isdir(path):
        return [_local(p) for p in _under(path, suffixes)]
    if os.path.exists(path):
        return [_local(path)]
    if glob.has_magic(path):
        return [_local(p) for p in sorted(glob.glob(path, recursive=True)) if os.path.isfile(p)]
    raise _not_found(path)


def _under(directory: str, suffixes: tuple[str, ...]) -> list[str]:
    found = (os.path.join(root, name) for root, _, names in os.walk(directory) for name in names)
    return sorted(path for path in found if _wanted(path, suffixes))


def _wanted(path: str, suffixes: tuple[str, ...]) -> bool:
    """Files such as `_SUCCESS` and `.part.crc` are the business of the tool that wrote them."""
    name = path.rsplit("/", 1)[-1]
    return not name.startswith(("_", ".")) and name.lower().endswith(suffixes)


def _local(path: str) -> File:
    try:
        stat = os.stat(path)
        with open(path, "rb"):
            return File(path, stat.st_size, str(stat.st_mtime_ns))
    except OSError as failure:
        raise error("SH308", f"cannot be read: {failure.strerror}", where=path,
                    fix="Give the file read permission.") from failure  # fmt: skip


def _not_found(path: str) -> ShoalError:
    parent, name = os.path.split(path)
    if not os.path.isdir(parent):
        return error("SH301", f"the directory {parent} does not exist", where=path)
    close = nearest(name, os.listdir(parent))
    return error("SH301", f"no such file: {path}", where=path, fix=f"Did you mean '{close}'?" if close else "")


# ---- remote ----


def _find_remote(url: str, suffixes: tuple[str, ...]) -> list[File]:
    with reaching(url):
        fs, path = _file_system(url)
        if "local" in (fs.protocol if isinstance(fs.protocol, tuple) else (fs.protocol,)):
            return _find_local(path, suffixes)
        if glob.has_magic(path) and not fs.exists(path):
            names = sorted(fs.glob(path))
        elif fs.isdir(path):
            names = sorted(name for name in fs.find(path) if _wanted(name, suffixes))
        else:
            names = [path]
        return [_remote(fs, name) for name in names]


def _file_system(url: str) -> tuple[Any, str]:
    import fsspec

    try:
        fs, path = fsspec.core.url_to_fs(url)
    except ValueError as failure:  # fsspec's way to say that it has never heard of the protocol
        raise ImportError(str(failure)) from failure
    return fs, str(path)


def _remote(fs: Any, path: str) -> File:
    info = fs.info(path)
    stamp = next((str(info[key]) for key in _STAMPS if info.get(key)), "")
    # HTTP servers may not tell a size: then the file is copied, and an empty copy fails to parse.
    size = info.get("size")
    return File(fs.unstrip_protocol(path), -1 if size is None else int(size), stamp, fs)
