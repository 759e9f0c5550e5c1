"""Images as pixels."""

from __future__ import annotations

from typing import IO, Any

import numpy as np

from shoal.data.source import Array
from shoal.errors import error


class PixelReader:
    """Reads images as uint8 [height, width, channels], scaled to `size` (height, width) if it is given."""

    def __init__(self, *, channels: int, size: tuple[int, int] | None) -> None:
        try:
            from PIL import Image
        except ImportError as failure:
            raise error("SH207", "images need Pillow", fix="pip install 'shoal[images]'") from failure
        self._pillow = Image
        self._mode = "L" if channels == 1 else "RGB"
        self._size = size

    def read(self, file: str | IO[bytes], where: str) -> Array:
        try:
            with self._pillow.open(file) as opened:
                image: Any = opened.convert(self._mode)
                if self._size is not None:
                    image = image.resize(self._size[::-1], self._pillow.Resampling.BILINEAR)
        except Exception as failure:  # Pillow's plug-ins raise exceptions of many types
            raise error("SH307", f"not a readable image: {failure}", where=where,
                        fix="Remove the file, or set data.on_bad_row: skip.") from failure  # fmt: skip
        pixels = np.asarray(image)
        return pixels if pixels.ndim == 3 else pixels[:, :, None]

    def is_readable(self, file: str | IO[bytes]) -> bool:
        try:
            with self._pillow.open(file) as opened:
                opened.load()
        except Exception:  # as above
            return False
        return True


def format_size(shape: tuple[int, ...]) -> str:
    return f"{shape[0]}×{shape[1]}"
