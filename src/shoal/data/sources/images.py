"""A folder with one sub-folder of images per class."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch

from shoal.data.batch import Batch
from shoal.data.files import DataFile, find_files, local_path
from shoal.data.source import Array, DataSource, Ids, SourceOptions
from shoal.data.sources.image_pixels import PixelReader, format_size
from shoal.errors import error
from shoal.spec.sources.config import ImagesSourceConfig

_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")


class ImageFolderSource(DataSource):
    """Pixels as floats in 0..1, shaped (channels, height, width). The class is the name of the folder, if there are
    labels."""

    in_memory = False
    per_sample = True
    name_column = "path"

    def __init__(self, spec: ImagesSourceConfig, options: SourceOptions) -> None:
        self._pixels = PixelReader(channels=spec.channels, size=spec.size)
        self._size = spec.size
        files = find_files(spec.path.rstrip("/"), options=options, suffixes=_SUFFIXES)
        names = [_class_name(file) for file in files]
        self.classes = options.classes or tuple(sorted(set(names)))
        self._files = files
        self._paths = [local_path(file, options=options) for file in files]
        self._labels = _class_numbers(names, files, self.classes) if options.labelled else None
        if options.skip_bad_rows:
            self._skip_unreadable()
        self._first_shape: tuple[int, ...] | None = None

    def __len__(self) -> int:
        return len(self._paths)

    def take(self, ids: Ids) -> Batch:
        images = [self._load_image(int(i)) for i in ids]
        shape = self._expected_shape(images[0])
        for i, image in zip(ids, images, strict=True):
            if image.shape != shape:
                raise error("SH306", f"an image of {format_size(image.shape)} among images of {format_size(shape)}",
                            where=self._paths[i], fix="Set data.source.size: [height, width].")  # fmt: skip
        pixels = torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).contiguous()
        target = None if self._labels is None else torch.from_numpy(self._labels[ids])
        return Batch((pixels.float().div_(255),), target, len(ids))

    def sizes(self) -> Array:
        return np.array([file.size_bytes for file in self._files], dtype=np.int64)

    def targets(self) -> Array:
        if self._labels is None:
            raise error("SH303", "the images have no target")
        return self._labels

    def own_columns(self) -> list[str]:
        return ["path", "class"]

    def own_column(self, name: str) -> Array:
        return np.array([file.path if name == "path" else _class_name(file) for file in self._files], dtype=str)

    def _expected_shape(self, image: Array) -> tuple[int, ...]:
        """The shape of the first image of the source, so that an image fails or passes in any batch."""
        if self._size is not None:
            return image.shape
        if self._first_shape is None:
            self._first_shape = self._load_image(0).shape
        return self._first_shape

    def _load_image(self, i: int) -> Array:
        return self._pixels.read(self._paths[i], self._paths[i])

    def _skip_unreadable(self) -> None:
        good = [i for i in range(len(self._paths)) if self._pixels.is_readable(self._paths[i])]
        self.skipped_rows = len(self._paths) - len(good)
        if not good:
            raise error("SH302", "no readable image", where=os.path.dirname(self._paths[0]))
        self._files = [self._files[i] for i in good]
        self._paths = [self._paths[i] for i in good]
        self._labels = None if self._labels is None else self._labels[good]


def _class_name(file: DataFile) -> str:
    return file.path.replace("\\", "/").rsplit("/", 2)[-2]


def _class_numbers(names: list[str], files: list[DataFile], classes: tuple[Any, ...]) -> Array:
    number = {name: i for i, name in enumerate(classes)}
    for name, file in zip(names, files, strict=True):
        if name not in number:
            raise error("SH310", f"the training data has no class '{name}'", where=file.path,
                        fix="Remove the folder, or train on it too.")  # fmt: skip
    return np.array([number[name] for name in names], dtype=np.int64)
