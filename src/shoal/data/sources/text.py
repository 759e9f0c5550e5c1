"""Text for a language model: characters or bytes as numbers, cut into samples of equal length."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from shoal.data.batch import Batch
from shoal.data.cache import SMALL_BYTES, NpyWriter, cached
from shoal.data.files import find_files, local_path
from shoal.data.source import Array, Ids, Opening, Source
from shoal.errors import error
from shoal.spec.data import TextSource

_CHUNK = 1 << 20
_BYTES = tuple(range(256))

Vocabulary = tuple[str | int, ...]


def open_text(spec: TextSource, opening: Opening) -> Text:
    files = find_files(spec.path, opening=opening, suffixes=(".txt", ".text", ".md"))
    paths = [local_path(file, opening=opening) for file in files]
    if sum(file.size_bytes for file in files) <= SMALL_BYTES:
        vocabulary = _vocabulary(paths, spec, opening)
        return Text(np.concatenate(list(_tokens(paths, vocabulary))), vocabulary, spec)

    def make(directory: Path) -> None:
        opening.tell(f"reading {spec.path} into the cache in {opening.cache_dir}, once")
        vocabulary = _vocabulary(paths, spec, opening)
        (directory / "vocabulary.json").write_text(json.dumps(vocabulary))
        with NpyWriter(directory / "tokens.npy") as file:
            for piece in _tokens(paths, vocabulary):
                file.append(piece)

    key = ["text", [file.identity for file in files], spec.level, opening.classes]
    directory = cached(opening.cache_dir, key, make)
    vocabulary = tuple(json.loads((directory / "vocabulary.json").read_text()))
    return Text(np.load(directory / "tokens.npy", mmap_mode="r"), vocabulary, spec)


def _vocabulary(paths: list[str], spec: TextSource, opening: Opening) -> Vocabulary:
    if spec.level == "byte":
        return _BYTES
    return opening.classes or tuple(sorted(set().union(*map(set, _characters(paths)))))


def _tokens(paths: list[str], vocabulary: Vocabulary) -> Iterator[Array]:
    return _bytes(paths) if vocabulary == _BYTES else _encoded(paths, vocabulary)


class Text(Source):
    """Sample i is `context` tokens from i·stride on; its target are the same, one further. No padding."""

    def __init__(self, tokens: Array, vocabulary: Vocabulary, spec: TextSource) -> None:
        self._tokens = tokens
        self._stride = spec.stride or spec.context
        self._window = np.arange(spec.context + 1, dtype=np.int64)
        self._context = spec.context
        self._size = (len(tokens) - spec.context - 1) // self._stride + 1
        if len(tokens) <= spec.context:
            raise error("SH306", f"{len(tokens)} tokens are too few for a context of {spec.context}",
                        where=spec.path, fix="Give a longer text, or a smaller context.")  # fmt: skip
        self.in_memory = not isinstance(tokens, np.memmap)
        self.classes = vocabulary

    @property
    def vocabulary(self) -> Vocabulary:
        """What token i stands for."""
        return self.classes or ()

    def __len__(self) -> int:
        return self._size

    def take(self, ids: Ids) -> Batch:
        tokens = self._tokens[(ids * self._stride)[:, None] + self._window]
        tensor = torch.from_numpy(tokens.astype(np.int64))
        return Batch((tensor[:, :-1].contiguous(),), tensor[:, 1:].contiguous(), len(ids))

    def sizes(self) -> Array:
        return np.full(len(self), self._context, dtype=np.int64)

    def targets(self) -> Array:
        """The token that follows each sample: whole targets would be as large as the text itself."""
        return np.asarray(self._tokens[np.arange(len(self)) * self._stride + self._context]).astype(np.int64)


def _characters(paths: list[str]) -> Iterator[str]:
    for path in paths:
        with open(path, encoding="utf-8", newline="") as file:
            try:
                yield from iter(lambda: file.read(_CHUNK), "")
            except UnicodeDecodeError as failure:
                raise error("SH307", f"not UTF-8 text: {failure.reason} at byte {failure.start}", where=path,
                            fix="Convert the text to UTF-8, or use level: byte.") from failure  # fmt: skip


def _encoded(paths: list[str], vocabulary: Vocabulary) -> Iterator[Array]:
    points = np.array([ord(str(letter)) for letter in vocabulary], dtype=np.uint32)
    small = np.uint8 if len(points) <= 256 else np.int32
    for text in _characters(paths):
        letters = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
        tokens = np.minimum(np.searchsorted(points, letters), len(points) - 1)
        unknown = points[tokens] != letters
        if unknown.any():
            letter = chr(int(letters[unknown][0]))
            raise error("SH310", f"the training text has no character {letter!r}", where=paths[0],
                        fix="Use level: byte, which knows every text.")  # fmt: skip
        yield tokens.astype(small)


def _bytes(paths: list[str]) -> Iterator[Array]:
    for path in paths:
        with open(path, "rb") as file:
            for chunk in iter(lambda: file.read(_CHUNK), b""):
                yield np.frombuffer(chunk, dtype=np.uint8)
