"""Text for a language model: characters or bytes as tokens, cut into samples of equal length."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from pydantic import TypeAdapter

from shoal.data.batch import Batch
from shoal.data.cache import SMALL_BYTES, NpyWriter, cached_directory, reading_cache
from shoal.data.files import find_files, local_path
from shoal.data.source import Array, DataSource, Ids, SourceOptions
from shoal.errors import error
from shoal.spec.sources.config import TextSourceConfig

_CHUNK = 1 << 20
_BYTE_VOCABULARY = tuple(range(256))

Vocabulary = tuple[str | int, ...]
_WORDS: TypeAdapter[Vocabulary] = TypeAdapter(Vocabulary)


def open_text(spec: TextSourceConfig, options: SourceOptions) -> TokenWindowSource:
    files = find_files(spec.path, options=options, suffixes=(".txt", ".text", ".md"))
    paths = [local_path(file, options=options) for file in files]
    if sum(file.size_bytes for file in files) <= SMALL_BYTES:
        vocabulary = _build_vocabulary(paths, spec, options)
        return TokenWindowSource(np.concatenate(list(_tokens(paths, vocabulary))), vocabulary, spec)

    def make(directory: Path) -> None:
        options.notify(f"reading {spec.path} into the cache in {options.cache_dir}, once")
        vocabulary = _build_vocabulary(paths, spec, options)
        (directory / "vocabulary.json").write_text(json.dumps(vocabulary))
        with NpyWriter(directory / "tokens.npy") as file:
            for piece in _tokens(paths, vocabulary):
                file.append(piece)

    key = ["text", [file.cache_key for file in files], spec.level, options.classes]
    directory = cached_directory(options.cache_dir, key, make)
    with reading_cache(directory):
        vocabulary = _WORDS.validate_json((directory / "vocabulary.json").read_bytes())
        return TokenWindowSource(np.load(directory / "tokens.npy", mmap_mode="r"), vocabulary, spec)


def _build_vocabulary(paths: list[str], spec: TextSourceConfig, options: SourceOptions) -> Vocabulary:
    if spec.level == "byte":
        return _BYTE_VOCABULARY
    return options.classes or tuple(sorted(set().union(*map(set, _characters(paths)))))


def _tokens(paths: list[str], vocabulary: Vocabulary) -> Iterator[Array]:
    return _byte_tokens(paths) if vocabulary == _BYTE_VOCABULARY else _character_tokens(paths, vocabulary)


class TokenWindowSource(DataSource):
    """Sample i is `context` tokens from i * stride on; its target is shifted by one token. No padding."""

    def __init__(self, tokens: Array, vocabulary: Vocabulary, spec: TextSourceConfig) -> None:
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
        """The character or byte of each token."""
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
        """The token after each sample: full targets would be as large as the text."""
        return np.asarray(self._tokens[np.arange(len(self)) * self._stride + self._context]).astype(np.int64)


def _characters(paths: list[str]) -> Iterator[str]:
    for path in paths:
        with open(path, encoding="utf-8", newline="") as file:
            try:
                yield from iter(lambda: file.read(_CHUNK), "")
            except UnicodeDecodeError as failure:
                raise error("SH307", f"not UTF-8 text: {failure.reason} at byte {failure.start}", where=path,
                            fix="Convert the text to UTF-8, or use level: byte.") from failure  # fmt: skip


def _character_tokens(paths: list[str], vocabulary: Vocabulary) -> Iterator[Array]:
    points = np.array([ord(str(letter)) for letter in vocabulary], dtype=np.uint32)
    small = np.uint8 if len(points) <= 256 else np.int32
    for text in _characters(paths):
        letters = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
        tokens = np.minimum(np.searchsorted(points, letters), len(points) - 1)
        unknown = points[tokens] != letters
        if unknown.any():
            letter = chr(int(letters[unknown][0]))
            raise error("SH310", f"the training text has no character {letter!r}", where=paths[0],
                        fix="Use level: byte, which accepts any text.")  # fmt: skip
        yield tokens.astype(small)


def _byte_tokens(paths: list[str]) -> Iterator[Array]:
    for path in paths:
        with open(path, "rb") as file:
            for chunk in iter(lambda: file.read(_CHUNK), b""):
                yield np.frombuffer(chunk, dtype=np.uint8)
