"""The job's directory as one archive for machines that do not have it: named by its content, sent once to each.

What .gitignore and .shoalignore name is left out, in the syntax of git, and also version control, environments,
caches of Python, runs and what Shoal keeps beside them. Links to files become files; links to directories are not
followed.
"""

from __future__ import annotations

import hashlib
import io
import os
import secrets
import stat
import tarfile
from collections.abc import Iterator
from pathlib import Path

from pathspec import GitIgnoreSpec

from shoal.checkpoint.weight_files import find_weight_files
from shoal.errors import ShoalError, error, from_os_error
from shoal.events.packed_file import has_content
from shoal.spec.remote.code_directory import MAX_CODE_FILES
from shoal.spec.remote.file_requests import CodeArchive, SentWeights
from shoal.spec.run_paths import BESIDE_RUNS

MAX_CODE_BYTES = 200 << 20
IGNORE_FILES = (".gitignore", ".shoalignore")
LEFT_OUT = BESIDE_RUNS | {".git", ".hg", ".svn", "__pycache__", ".mypy_cache", ".ruff_cache", ".pytest_cache"}
_LARGEST_SHOWN = 3


def pack_code(base_dir: Path, target: Path) -> CodeArchive:
    """Write the archive of `base_dir` into the directory `target`, if it is not there yet. SH655 if it is too large."""
    try:
        return pack_files(base_dir, find_code(base_dir), target)
    except OSError as failure:
        raise _cannot_pack(base_dir, failure) from failure


def pack_weights(path: Path, target: Path) -> SentWeights:
    """Write an archive of the weights at a path: of a run, a checkpoint or a file. SH501 if there are none."""
    root, names, given = find_weight_files(path)
    return SentWeights(archive=pack_files(root, names, target), path=given)


def pack_files(base_dir: Path, files: list[str], target: Path) -> CodeArchive:
    """Write an archive of these files into the directory `target`, if it is not there yet."""
    try:
        target.mkdir(parents=True, exist_ok=True)
        temporary = target / f".tmp-{secrets.token_hex(6)}"
        try:
            archive = _write_archive(base_dir, files, temporary)
            temporary.replace(target / archive_name(archive))
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as failure:
        raise _cannot_pack(base_dir, failure) from failure
    return archive


def _cannot_pack(base_dir: Path, failure: OSError) -> ShoalError:
    return from_os_error(failure) or error("SH605", f"cannot pack {base_dir}: {failure}")


def archive_name(archive: CodeArchive) -> str:
    return f"{archive.sha256}.tar"


def find_code(base_dir: Path) -> list[str]:
    """The files to send, relative to `base_dir` and sorted. SH655 if they are too many or too large."""
    found: dict[str, int] = {}
    total = 0
    for path, size_bytes in _walk(base_dir, base_dir, []):
        found[path] = size_bytes
        total += size_bytes
        if total > MAX_CODE_BYTES or len(found) > MAX_CODE_FILES:
            raise _too_large(base_dir, found)
    return sorted(found)


def _too_large(base_dir: Path, found: dict[str, int]) -> ShoalError:
    if len(found) > MAX_CODE_FILES:
        return error("SH655", f"more than {MAX_CODE_FILES:,} files", where=str(base_dir))
    largest = sorted(found, key=lambda path: -found[path])[:_LARGEST_SHOWN]
    shown = ", ".join(f"{path} ({found[path] / 1e6:.0f} MB)" for path in largest)
    return error("SH655", f"more than {MAX_CODE_BYTES >> 20} MB; the largest so far: {shown}", where=str(base_dir))


Rules = list[tuple[Path, GitIgnoreSpec]]


def _walk(base_dir: Path, directory: Path, rules: Rules) -> Iterator[tuple[str, int]]:
    rules = [*rules, *_rules_of(directory)]
    with os.scandir(directory) as entries:
        for entry in sorted(entries, key=lambda one: one.name):
            path = Path(entry.path)
            if entry.name in LEFT_OUT or _is_ignored(path, rules, is_directory=entry.is_dir(follow_symlinks=False)):
                continue
            if entry.is_dir(follow_symlinks=False):
                if not _is_left_out(path):
                    yield from _walk(base_dir, path, rules)
            elif entry.is_file():
                yield path.relative_to(base_dir).as_posix(), entry.stat().st_size


def _rules_of(directory: Path) -> Rules:
    found = []
    for name in IGNORE_FILES:
        if (directory / name).is_file():
            lines = (directory / name).read_text(encoding="utf-8", errors="replace").splitlines()
            found.append((directory, GitIgnoreSpec.from_lines(lines)))
    return found


def _is_ignored(path: Path, rules: Rules, *, is_directory: bool) -> bool:
    """The last rule that says something decides, as in git."""
    ignored = False
    for directory, spec in rules:
        relative = path.relative_to(directory).as_posix() + ("/" if is_directory else "")
        verdict = spec.check_file(relative).include
        ignored = ignored if verdict is None else verdict
    return ignored


def _is_left_out(directory: Path) -> bool:
    """An environment, or a run."""
    is_run = (directory / "job.yaml").is_file() and has_content(directory / "events.jsonl")
    return is_run or (directory / "pyvenv.cfg").is_file()


class _HashingWriter(io.RawIOBase):
    """Writes to a file and hashes what it writes."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb")
        self.sha256 = hashlib.sha256()
        self.size_bytes = 0

    def writable(self) -> bool:
        return True

    def write(self, data: bytes) -> int:  # type: ignore[override]
        self.sha256.update(data)
        self.size_bytes += len(data)
        return self._file.write(data)

    def close(self) -> None:
        if not self._file.closed:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
        super().close()


def _write_archive(base_dir: Path, files: list[str], target: Path) -> CodeArchive:
    """Equal directories give equal archives: no times, no owners."""
    with _HashingWriter(target) as writer:
        with tarfile.open(fileobj=writer, mode="w|", format=tarfile.GNU_FORMAT) as archive:
            for name in files:
                with (base_dir / name).open("rb") as file:
                    status = os.fstat(file.fileno())
                    info = tarfile.TarInfo(name)
                    info.size = status.st_size
                    info.mode = 0o755 if status.st_mode & stat.S_IXUSR else 0o644
                    archive.addfile(info, file)
        return CodeArchive(sha256=writer.sha256.hexdigest(), size_bytes=writer.size_bytes)
