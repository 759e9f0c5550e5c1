"""Answers that a compression got, kept so that one that was killed goes on where it was.

The decisions of a compression follow from the answers alone. Whoever goes on decides everything again, is told what is
known, and works only for the rest.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from shoal.spec.base import Spec


class AnswerRow(Spec):
    key: str
    answer: dict[str, Any]


class AnswerLog:
    """The answers in the order in which they were given. Equal questions have several answers, one for each time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known: dict[str, list[dict[str, Any]]] = defaultdict(list)
        for row in _read(path):
            self._known[row.key].append(row.answer)

    def take(self, key: str) -> dict[str, Any] | None:
        """The next answer to this question; None if it must be asked. One whose files are not as they were is none."""
        answers = self._known.get(key)
        answer = answers.pop(0) if answers else None
        return answer if answer is not None and all(map(_is_whole, _files(answer))) else None

    def add(self, key: str, answer: Mapping[str, Any]) -> None:
        line = AnswerRow(key=key, answer=dict(answer)).model_dump_json() + "\n"
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("ab") as file:
            if file.tell() and not _ends_whole(self._path):
                file.write(b"\n")  # whoever wrote the last row was killed
            file.write(line.encode())
            file.flush()
            os.fsync(file.fileno())


def question_key(*question: Any) -> str:
    return hashlib.sha256(json.dumps(question, sort_keys=True).encode()).hexdigest()


def _read(path: Path) -> Iterator[AnswerRow]:
    """The rows that can be read. A damaged one costs the work of its answer."""
    with contextlib.suppress(OSError):
        for line in path.read_bytes().splitlines():
            with contextlib.suppress(ValidationError):
                yield AnswerRow.model_validate_json(line)


def _ends_whole(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read() == b"\n"


def _files(answer: Any) -> Iterator[tuple[str, str]]:
    """Paths and digests of the files that an answer names."""
    if isinstance(answer, dict):
        if isinstance(answer.get("path"), str) and isinstance(answer.get("sha256"), str):
            yield answer["path"], answer["sha256"]
        answer = list(answer.values())
    if isinstance(answer, list):
        for one in answer:
            yield from _files(one)


def _is_whole(file: tuple[str, str]) -> bool:
    path, sha256 = file
    try:
        if not os.path.isfile(path):  # a pipe would never end
            return False
        with open(path, "rb") as opened:
            return hashlib.file_digest(opened, "sha256").hexdigest() == sha256
    except (OSError, ValueError):  # a name with a zero byte
        return False
