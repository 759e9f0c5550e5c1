"""Buffers that are sent without conversion, and shared memory that peers on the same host read."""

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
    """Bytes for sockets, with a torch view made on first use: clients of parameter servers may have no torch.

    Untouched pages take no memory.
    """

    raw: memoryview

    @cached_property
    def tensor(self) -> Tensor:
        import torch

        if not len(self.raw):
            return torch.empty(0, dtype=torch.uint8)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns about read-only memory
            return torch.frombuffer(self.raw, dtype=torch.uint8)

    @classmethod
    def private(cls, size_bytes: int) -> ByteBuffer:
        """Zeros in pages of their own: results may depend on the alignment of memory."""
        pages = mmap.mmap(-1, max(size_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        return cls(memoryview(pages)[:size_bytes])

    def subrange(self, start: int, stop: int) -> ByteBuffer:
        return ByteBuffer(self.raw[start:stop])


class SharedMemory:
    """Memory that only its owner can write. It has no name, so it disappears with the last process that maps it.

    `fd` is sent to peers. It is sealed: peers can only map it for reading, and no process can shrink it under a reader.
    """

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.fd = os.memfd_create("shoal", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, size_bytes)
        mapped = mmap.mmap(self.fd, size_bytes)
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEALS)
        self.buffer = ByteBuffer(memoryview(mapped))

    def close(self) -> None:
        """Close the descriptor. The memory is freed with the last tensor that uses it."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def attach(fd: int, size_bytes: int) -> ByteBuffer:
    """Map a peer's shared memory for reading; closes `fd`. LinkError if it is not sealed or has another size."""
    try:
        sealed = fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
        if not sealed or os.fstat(fd).st_size != size_bytes:
            raise LinkError("shares memory of another size, or memory that is not sealed")
        mapped = mmap.mmap(fd, size_bytes, prot=mmap.PROT_READ)
    except (OSError, ValueError) as failure:  # ValueError: size 0
        raise LinkError(f"shares memory that cannot be read: {failure}") from failure
    finally:
        os.close(fd)
    return ByteBuffer(memoryview(mapped))
