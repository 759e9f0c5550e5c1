"""Memory that goes over the wire as it is, or that peers on the same host read directly."""

from __future__ import annotations

import fcntl
import mmap
import os
import warnings
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from shoal.net.errors import LinkError

if TYPE_CHECKING:
    from torch import Tensor

_F_SEAL_FUTURE_WRITE = 0x10  # fcntl does not name it
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL | _F_SEAL_FUTURE_WRITE


@dataclass(frozen=True)
class ByteBuffer:
    """Bytes as sockets see them, and as torch does where somebody asks for that: clients of servers may have no torch.

    Pages that nobody touches cost nothing.
    """

    raw: memoryview

    @cached_property
    def tensor(self) -> Tensor:
        import torch

        if not len(self.raw):
            return torch.empty(0, dtype=torch.uint8)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch would rather have memory that can be written
            return torch.frombuffer(self.raw, dtype=torch.uint8)

    @classmethod
    def private(cls, size_bytes: int) -> ByteBuffer:
        """Zeros, on a page of its own: bits may depend on how memory is aligned."""
        pages = mmap.mmap(-1, max(size_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        return cls(memoryview(pages)[:size_bytes])

    def subrange(self, start: int, stop: int) -> ByteBuffer:
        return ByteBuffer(self.raw[start:stop])


class SharedMemory:
    """Memory that its owner alone can write. It has no name, so it goes with the last process that maps it.

    `fd` is for handing to peers. It is sealed: they can only map it for reading, and nobody can take pages away from
    those who read.
    """

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.fd = os.memfd_create("shoal", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, size_bytes)
        mapped = mmap.mmap(self.fd, size_bytes)
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEALS)
        self.buffer = ByteBuffer(memoryview(mapped))

    def close(self) -> None:
        """The memory itself goes when the last tensor over it does."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def attach(fd: int, size_bytes: int) -> ByteBuffer:
    """A peer's arena, for reading; `fd` is closed. LinkError if it is not one, or of another size."""
    try:
        sealed = fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
        if not sealed or os.fstat(fd).st_size != size_bytes:
            raise LinkError("shares memory of another size, or that could vanish")
        mapped = mmap.mmap(fd, size_bytes, prot=mmap.PROT_READ)
    except (OSError, ValueError) as failure:  # ValueError: of no size
        raise LinkError(f"shares memory that cannot be read: {failure}") from failure
    finally:
        os.close(fd)
    return ByteBuffer(memoryview(mapped))
