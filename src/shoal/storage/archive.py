"""Archives of runs at a URL that fsspec reaches (`s3://bucket/runs`, `file:///mnt/archive`): copied, read back, and
compared by SHA-256.

The list of files (`shoal-archive.json`) is written last, so an archive that was broken off is not one. What can be made
again, locks and the token of the driver are left out: every name that begins with a dot.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO

from pydantic import Field, ValidationError

from shoal.errors import error
from shoal.fleet.orphans import find_orphans
from shoal.jobs import run_dir
from shoal.spec.base import Spec
from shoal.spec.run_paths import RunPaths

if TYPE_CHECKING:
    pass

LIST = "shoal-archive.json"
PIECE_BYTES = 1 << 20
MAX_LIST_BYTES = 1 << 27


class ArchivedFile(Spec):
    path: Annotated[str, Field(min_length=1, max_length=4096)]
    size_bytes: Annotated[int, Field(ge=0)]
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]

    @property
    def is_inside(self) -> bool:
        parts = PurePosixPath(self.path).parts
        return not self.path.startswith("/") and all(part and part[0] != "." and "\\" not in part for part in parts)


class ArchiveList(Spec):
    run: Annotated[str, Field(min_length=1, max_length=255)]
    version: Annotated[int, Field(ge=1, le=1)] = 1
    files: list[ArchivedFile]

    @property
    def is_tree(self) -> bool:
        """Whether it has files, each once, and none below another."""
        paths = {PurePosixPath(one.path) for one in self.files}
        is_below = any(parent in paths for path in paths for parent in path.parents)
        return 0 < len(self.files) == len(paths) and not is_below and all(one.is_inside for one in self.files)

    @property
    def size_bytes(self) -> int:
        return sum(one.size_bytes for one in self.files)


def archive_run(paths: RunPaths, url: str, *, show: Callable[[str], None] = lambda line: None) -> ArchiveList:
    """Copy the run to URL/NAME, read every file back and compare it. SH602 if a driver or a worker of the run lives,
    SH681 if something else is there already or a file came back changed. An archive with the same files is left as it
    is."""
    if left := [one.seat.name for fold in paths.folds or [paths] for one in find_orphans(fold)]:
        raise error("SH602", f"these processes of '{paths.name}' live: {', '.join(left)}", where=str(paths.root))
    with run_dir.driver_lock(paths), run_dir.readable(paths):
        place = _Place(url, paths.name)
        wanted = ArchiveList(run=paths.name, files=[_describe(paths.root, path) for path in _files(paths.root)])
        there = place.read_list(required=False)
        if there is not None and there != wanted:
            fix = "Archive to another URL, or remove that archive."
            raise error("SH681", "another archive of this name is there", where=place.where, fix=fix)
        for one in wanted.files if there is None else ():
            with _open_inside(paths.root / one.path) as file:
                place.write(one.path, file)
        show(f"{len(wanted.files)} files are copied; reading them back")
        for one in wanted.files:
            if _digest(place.open(one.path)) != (one.sha256, one.size_bytes):
                raise error("SH681", f"{one.path} came back changed", where=place.where)
        if there is None:
            place.write_list(wanted)
    return wanted


def fetch_run(url: str, runs: Path) -> RunPaths:
    """Bring an archived run (URL/NAME) back into the directory, every file compared by its SHA-256. SH681 if it is not
    an archive, is damaged, or a run of its name is here."""
    parent, _, name = url.rstrip("/").rpartition("/")
    place = _Place(parent, name)
    found = place.read_list(required=True)
    assert found is not None
    target = runs.resolve() / name
    if found.run != name or name.startswith(".") or not found.is_tree:
        raise error("SH681", "its list of files is damaged", where=place.where)
    if target.exists() or target.is_symlink():
        raise error("SH681", f"{target} exists", where=place.where, fix="Move it away, then fetch.")
    scratch = runs.resolve() / f".fetch-{secrets.token_hex(6)}"
    try:
        for one in found.files:
            _fetch_file(place, one, scratch / one.path)
        os.rename(scratch, target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return RunPaths(target)


def _fetch_file(place: _Place, one: ArchivedFile, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    digest, size = hashlib.sha256(), 0
    with place.open(one.path) as source, target.open("xb") as file:
        for piece in _pieces(source):
            size += len(piece)
            if size > one.size_bytes:
                break
            digest.update(piece)
            file.write(piece)
    if (digest.hexdigest(), size) != (one.sha256, one.size_bytes):
        raise error("SH681", f"{one.path} is damaged in the archive", where=place.where)


class _Place:
    """The directory of one archive behind a URL. SH681 if it cannot be reached."""

    def __init__(self, url: str, name: str) -> None:
        import fsspec

        self.where = f"{url.rstrip('/')}/{name}"
        try:
            self._fs, self._root = fsspec.core.url_to_fs(self.where)
        except (ValueError, ImportError) as failure:
            raise error("SH681", str(failure), where=self.where) from failure

    def write(self, path: str, file: BinaryIO) -> None:
        full = f"{self._root}/{path}"
        try:
            self._fs.makedirs(full.rsplit("/", 1)[0], exist_ok=True)
            with self._fs.open(full, "wb") as target:
                shutil.copyfileobj(file, target, PIECE_BYTES)
        except OSError as failure:
            raise error("SH681", f"{path} cannot be written: {failure}", where=self.where) from failure

    def open(self, path: str) -> BinaryIO:
        try:
            found: BinaryIO = self._fs.open(f"{self._root}/{path}", "rb")
        except OSError as failure:
            raise error("SH681", f"{path} cannot be read: {failure}", where=self.where) from failure
        return found

    def write_list(self, found: ArchiveList) -> None:
        self._fs.pipe_file(f"{self._root}/{LIST}", found.model_dump_json(indent=1).encode())

    def read_list(self, *, required: bool) -> ArchiveList | None:
        self._fs.invalidate_cache()
        try:
            with self._fs.open(f"{self._root}/{LIST}", "rb") as file:
                return ArchiveList.model_validate(json.loads(file.read(MAX_LIST_BYTES)))
        except FileNotFoundError as failure:
            if not required:
                return None
            raise error("SH681", "there is no archive of a run", where=self.where) from failure
        except (OSError, ValueError, ValidationError, RecursionError) as failure:
            raise error("SH681", f"its list of files cannot be read: {failure}", where=self.where) from failure


def _files(root: Path) -> Iterator[Path]:
    """Regular files, in order; links are not followed."""
    for directory, names, files in os.walk(root):
        names[:] = sorted(name for name in names if not name.startswith("."))
        for name in sorted(files):
            path = Path(directory) / name
            if not name.startswith(".") and stat.S_ISREG(path.lstat().st_mode):
                yield path


def _describe(root: Path, path: Path) -> ArchivedFile:
    with _open_inside(path) as file:
        sha256, size = _digest(file)
    return ArchivedFile(path=path.relative_to(root).as_posix(), size_bytes=size, sha256=sha256)


def _open_inside(path: Path) -> BinaryIO:
    return os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb")


def _digest(file: BinaryIO) -> tuple[str, int]:
    digest, size = hashlib.sha256(), 0
    with file:
        for piece in _pieces(file):
            digest.update(piece)
            size += len(piece)
    return digest.hexdigest(), size


def _pieces(file: Any) -> Iterator[bytes]:
    while piece := file.read(PIECE_BYTES):
        yield piece
