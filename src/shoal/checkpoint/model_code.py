"""The user's code beside an exported model, so that the directory `model` alone is enough to load it."""

from __future__ import annotations

import json
import struct
import sys
import zipfile
import zlib
from collections.abc import Iterable
from hashlib import sha256
from pathlib import Path
from typing import Any

from shoal.checkpoint.files import atomic_replace
from shoal.checkpoint.model_check import MODEL_INFO, WEIGHTS
from shoal.errors import error
from shoal.spec.resolve import is_user_file

CODE = "code.zip"
MAX_CODE_BYTES = 64 << 20
_DATE = (1980, 1, 1, 0, 0, 0)
"""Of every file in the archive: the same code makes the same bytes."""
_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)


def pack_code(target: Path, base_dir: str) -> list[str]:
    """Write the modules that this process has imported from the job's directory. Returns their names."""
    base = Path(base_dir).resolve()
    files = sorted(_imported_files(base))
    with atomic_replace(target) as temporary, zipfile.ZipFile(temporary, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in files:
            archive.writestr(zipfile.ZipInfo(file.relative_to(base).as_posix(), _DATE), file.read_bytes())
    return [file.relative_to(base).as_posix() for file in files]


def _imported_files(base: Path) -> Iterable[Path]:
    for module in list(sys.modules.values()):
        name = getattr(module, "__file__", None)
        if not isinstance(name, str) or not name.endswith(".py") or not is_user_file(name):
            continue
        file = Path(name).resolve()
        if file.is_relative_to(base) and file.is_file():
            yield file


def read_model_info(directory: Path) -> dict[str, Any]:
    """model.json of a model's directory. SH811 if it is not one."""
    try:
        found = json.loads((directory / MODEL_INFO).read_bytes())
        complete = isinstance(found, dict) and isinstance(found.get("job"), dict) and (directory / WEIGHTS).is_file()
    except (OSError, ValueError, RecursionError) as failure:
        raise error("SH811", f"{MODEL_INFO} cannot be read: {failure}", where=str(directory)) from None
    if not complete:
        raise error("SH811", f"{MODEL_INFO} has no job, or {WEIGHTS} is missing", where=str(directory))
    return dict(found)


def unpack_code(directory: Path, cache: Path) -> Path:
    """The directory with the model's code, unpacked once per content. SH811 if the archive is damaged or too large."""
    archive = directory / CODE
    try:
        content = archive.read_bytes()
        target = cache / "model-code" / sha256(content).hexdigest()
        with zipfile.ZipFile(archive) as files:
            entries = files.infolist()
            if any(entry.compress_type not in _METHODS for entry in entries):
                raise ValueError("it is packed in another way than Shoal packs")
            if sum(entry.file_size for entry in entries) > MAX_CODE_BYTES:
                raise error("SH811", f"{CODE} holds more than {MAX_CODE_BYTES >> 20} MB", where=str(directory))
            for entry in entries:
                file = target / entry.filename
                if not file.resolve().is_relative_to(target.resolve()):
                    raise error("SH811", f"{CODE} names a file outside of it: {entry.filename}", where=str(directory))
                file.parent.mkdir(parents=True, exist_ok=True)
                with atomic_replace(file) as temporary:
                    temporary.write_bytes(files.read(entry))
    except (OSError, zipfile.BadZipFile, ValueError, EOFError, RuntimeError, struct.error, zlib.error) as failure:
        raise error("SH811", f"{CODE} cannot be read: {failure}", where=str(directory)) from None
    return target
