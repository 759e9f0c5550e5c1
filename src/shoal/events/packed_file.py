"""Files of finished runs in less space: `events.jsonl` becomes `events.jsonl.gz`, and whoever reads goes on as before.

A packed file is gzip, so `zcat` reads it. It consists of members that each hold a block of the content, so that any
position is reached by unpacking one block. An empty last member holds the size and the SHA-256 of the content. While
both files exist, the plain one counts.
"""

from __future__ import annotations

import bisect
import contextlib
import errno
import hashlib
import io
import os
import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

SUFFIX = ".gz"
BLOCK_BYTES = 1 << 18
_HEADER = struct.Struct("<4sIBBH2sH")  # gzip's fixed fields with an extra field, its name and its length
_SIZES = struct.Struct("<II")  # bytes of the member and of its content
_TOTAL = struct.Struct("<Q32s")  # bytes and SHA-256 of the whole content
_TRAILER = struct.Struct("<II")  # CRC-32 and length of the content
_MAGIC = b"\x1f\x8b\x08\x04"
MAX_RATIO = 1100
"""Deflate makes nothing smaller than by a factor of 1032."""
_EMPTY = zlib.compress(b"", 6, -15)
_BLOCK, _END = b"Sb", b"Se"
_END_BYTES = _HEADER.size + _TOTAL.size + len(_EMPTY) + _TRAILER.size


def packed_path(path: Path) -> Path:
    return path.with_name(path.name + SUFFIX)


def open_plain(path: Path) -> BinaryIO:
    return path.open("rb")


def open_content(path: Path, opened: Callable[[Path], BinaryIO] = open_plain) -> BinaryIO:
    """The content of a file, packed or not, for reading and seeking. `opened` opens one of the two. OSError (EIO), also
    from reading, if a packed file is damaged."""
    try:
        return opened(path)
    except FileNotFoundError:
        try:
            return io.BufferedReader(PackedReader(opened(packed_path(path))))
        except FileNotFoundError:
            return opened(path)  # it was unpacked meanwhile, or there is none


def stat_content(path: Path | str) -> os.stat_result:
    """The status of the file that holds the content, packed or not."""
    try:
        return os.stat(path)
    except FileNotFoundError:
        with contextlib.suppress(FileNotFoundError):
            return os.stat(f"{path}{SUFFIX}")
        raise


def content_size(file: BinaryIO) -> int:
    """The length of the content. The position stays."""
    before = file.tell()
    size = file.seek(0, os.SEEK_END)
    file.seek(before)
    return size


def size_of_content(path: Path) -> int:
    """0 if there is no such file."""
    with contextlib.suppress(FileNotFoundError):
        return path.stat().st_size
    try:
        with open_content(path) as file:
            return content_size(file)
    except FileNotFoundError:
        return 0


def has_content(path: Path) -> bool:
    return path.exists() or packed_path(path).exists()


# ---- reading ----


def _damaged(why: str) -> OSError:
    return OSError(errno.EIO, f"a packed file is damaged: {why}")


class PackedReader(io.RawIOBase):
    """The content of a packed file. Keeps one unpacked block."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        try:
            self.size, self.sha256 = self._read_end()
        except BaseException:
            file.close()
            raise
        self._position = 0
        self._starts: list[int] = []  # of each block in the content
        self._members: list[int] = []  # of each member in the file
        self._block: tuple[int, bytes] = (-1, b"")

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self.size}[whence]
        self._position = max(0, base + offset)
        return self._position

    def readinto(self, buffer: WriteableBuffer) -> int:
        if self._position >= self.size:
            return 0
        start, content = self._block_at(self._position)
        found = content[self._position - start :][: len(memoryview(buffer))]
        memoryview(buffer)[: len(found)] = found
        self._position += len(found)
        return len(found)

    def close(self) -> None:
        self._file.close()
        super().close()

    def _read_end(self) -> tuple[int, bytes]:
        length = self._file.seek(0, os.SEEK_END)
        self._file.seek(max(0, length - _END_BYTES))
        end = self._file.read(_END_BYTES)
        if len(end) != _END_BYTES or not _is_member(end, _END, _TOTAL.size):
            raise _damaged("its end is missing")
        size, sha256 = _TOTAL.unpack_from(end, _HEADER.size)
        if size > length * MAX_RATIO or (size == 0) != (length == _END_BYTES):
            raise _damaged("its size is impossible")
        return size, sha256

    def _block_at(self, position: int) -> tuple[int, bytes]:
        if not self._starts:
            self._read_members()
        number = bisect.bisect_right(self._starts, position) - 1
        if self._block[0] != number:
            self._block = number, self._unpack(self._members[number])
        start, content = self._starts[number], self._block[1]
        if position >= start + len(content):
            raise _damaged("a block is too short")
        return start, content

    def _read_members(self) -> None:
        start = member = 0
        while start < self.size:
            self._starts.append(start)
            self._members.append(member)
            member_bytes, content_bytes = self._sizes_at(member)
            start, member = start + content_bytes, member + member_bytes
        if start != self.size:
            self._starts, self._members = [], []
            raise _damaged("its blocks have another size")

    def _sizes_at(self, member: int) -> tuple[int, int]:
        self._file.seek(member)
        header = self._file.read(_HEADER.size + _SIZES.size)
        if len(header) != _HEADER.size + _SIZES.size or not _is_member(header, _BLOCK, _SIZES.size):
            raise _damaged("a block has no header")
        member_bytes, content_bytes = _SIZES.unpack_from(header, _HEADER.size)
        smallest, most = len(header) + _TRAILER.size, len(header) + 2 * BLOCK_BYTES + 100
        if not (smallest < member_bytes <= most and 0 < content_bytes <= BLOCK_BYTES):
            raise _damaged("a block has an impossible size")
        return member_bytes, content_bytes

    def _unpack(self, member: int) -> bytes:
        member_bytes, content_bytes = self._sizes_at(member)
        packed = self._file.read(member_bytes - _HEADER.size - _SIZES.size)
        try:
            content = zlib.decompressobj(-15).decompress(packed[: -_TRAILER.size], content_bytes)
        except zlib.error as failure:
            raise _damaged(str(failure)) from failure
        if packed[-_TRAILER.size :] != _TRAILER.pack(zlib.crc32(content), content_bytes):
            raise _damaged("a block has another checksum")
        return content


def _is_member(start: bytes, name: bytes, length: int) -> bool:
    return start[: _HEADER.size] == _header(name, length)


def _header(name: bytes, length: int) -> bytes:
    return _HEADER.pack(_MAGIC, 0, 0, 255, 4 + length, name, length)


# ---- packing ----


def pack_blocks(content: BinaryIO) -> Iterator[bytes]:
    """The members of the packed file."""
    digest, size = hashlib.sha256(), 0
    while block := content.read(BLOCK_BYTES):
        digest.update(block)
        size += len(block)
        yield pack_block(block)
    end = _header(_END, _TOTAL.size) + _TOTAL.pack(size, digest.digest())
    yield end + _EMPTY + _TRAILER.pack(0, 0)


def pack_block(block: bytes) -> bytes:
    packed = zlib.compress(block, 6, -15)
    member_bytes = _HEADER.size + _SIZES.size + len(packed) + _TRAILER.size
    sizes = _header(_BLOCK, _SIZES.size) + _SIZES.pack(member_bytes, len(block))
    return sizes + packed + _TRAILER.pack(zlib.crc32(block), len(block))


def pack_file(path: Path) -> None:
    """Replace the file by its packed form. It is read back and compared before the plain file goes, and at every moment
    one of the two is complete. The time of the last change stays."""
    target = packed_path(path)
    with path.open("rb") as plain, _replacing(target) as part:
        for member in pack_blocks(plain):
            part.write(member)
        part.flush()
        wanted = _digest(plain)
        with PackedReader(open_plain(Path(part.name))) as packed:
            if _digest(io.BufferedReader(packed)) != wanted:
                raise OSError(errno.EIO, "what was packed reads differently", str(target))
        _keep_times(plain, part)
    path.unlink()


def unpack_file(path: Path) -> None:
    """Undo `pack_file`. OSError, and nothing is changed, if the packed file is damaged."""
    source = packed_path(path)
    with PackedReader(open_plain(source)) as reader, open_plain(source) as file, _replacing(path) as part:
        digest = hashlib.sha256()
        while block := reader.read(BLOCK_BYTES):
            digest.update(block)
            part.write(block)
        if digest.digest() != reader.sha256:
            raise _damaged("its content has another digest")
        _keep_times(file, part)
    source.unlink()


def begins_with_packed(path: Path) -> bool:
    """Whether the plain file has everything that its packed form has, and perhaps more after it. OSError if the packed
    file is damaged."""
    with path.open("rb") as plain, PackedReader(open_plain(packed_path(path))) as reader:
        while block := reader.read(BLOCK_BYTES):
            if plain.read(len(block)) != block:
                return False
    return True


def _digest(file: BinaryIO) -> bytes:
    file.seek(0)
    digest = hashlib.sha256()
    while block := file.read(BLOCK_BYTES):
        digest.update(block)
    return digest.digest()


def _keep_times(source: BinaryIO, target: BinaryIO) -> None:
    found = os.fstat(source.fileno())
    target.flush()
    os.utime(target.fileno(), ns=(found.st_atime_ns, found.st_mtime_ns))


@contextlib.contextmanager
def _replacing(target: Path) -> Iterator[BinaryIO]:
    """A new file that takes the place of `target` if the block succeeds, on the disk also if the machine crashes."""
    part = target.with_name(f".{target.name}.tmp")
    try:
        with part.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)
    directory = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
