"""Archives of code from one who may send them, with names, links and sizes that lie: nothing outside of the directory
is written, what is there is what was announced, and another archive arrives as before.

`make test` unpacks some hundred archives, `make test-all` 20,000.
"""

import contextlib
import errno
import hashlib
import io
import os
import shutil
import tarfile
import zipfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.checkpoint import model_code
from shoal.errors import ShoalError
from shoal.jobs.remote.code_archive import archive_name, pack_files
from shoal.spec.remote.code_directory import MAX_CODE_FILES, WrongCodeError, code_directory, unpack_code
from shoal.spec.remote.file_requests import CodeArchive
from tests.conftest import long_only
from tests.fuzz.grammar import damaged
from tests.fuzz.test_files import examples

FEW, MANY = 80, 20_000
NAMES = ["model.py", "sub/data.bin", "a" * 90 + "/" + "b" * 90, "umlaut-ü.py", "empty"]
NASTY_NAMES = ["..", ".", "", "/", "../x", "a/../../x", "/tmp/x", "a//b", "a\\..\\b", "model.py", "sub", "link/x",
               "sub/data.bin/x", "x" * 300, "y/" * 40 + "z", "\udcff", "\x1b[2J", "~root", "link"]  # fmt: skip
TYPES = [tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.LNKTYPE, tarfile.SYMTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE,
         tarfile.DIRTYPE, tarfile.FIFOTYPE, tarfile.CONTTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK,
         tarfile.GNUTYPE_SPARSE, tarfile.XHDTYPE, tarfile.XGLTYPE, b"?"]  # fmt: skip
LINKS = ["/etc", "..", "../..", ".", "model.py", "a/" * 2000]
SIZES = [0, 1, 511, 512, 513, -1, -512, 8**11 - 1, 2**40, 2**63, -(2**63)]
PAX = [b"20 path=../outside.py\n", b"30 GNU.sparse.realsize=9999999\n", b"13 size=-512\n", b"5 a=\n" * 50, b"9" * 400]


def header(name, kind=tarfile.REGTYPE, size=0, link="", mode=0o644):
    info = tarfile.TarInfo(name)
    info.type, info.size, info.linkname, info.mode = kind, size, link, mode
    fields = info.get_info() | {"name": name, "linkname": link[:100]}
    with contextlib.suppress(ValueError):
        made = info.create_gnu_header(fields, "utf-8", "surrogateescape")
        # the type of what follows is ours, also where tarfile would not write it
        return made[: -512 + 156] + kind + made[-512 + 157 :] if kind != tarfile.GNUTYPE_LONGNAME else made
    return b"\0" * 512


def with_checksum(block):
    """The header after a change."""
    block = bytearray(block)
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


def padded(content):
    return content + b"\0" * (-len(content) % 512)


@st.composite
def members(draw):
    """One file as pack_files writes it, or one that lies about something."""
    name, content = draw(st.sampled_from(NAMES)), draw(st.binary(max_size=40) | st.sampled_from([b"x" * 600]))
    how = draw(st.sampled_from(["sound", "name", "type", "link", "size", "pax", "field"]))
    if how == "name":
        return header(draw(st.sampled_from(NASTY_NAMES)), size=len(content)) + padded(content)
    if how == "type":
        return header(name, draw(st.sampled_from(TYPES)), len(content)) + padded(content)
    if how == "link":
        kind = draw(st.sampled_from([tarfile.SYMTYPE, tarfile.LNKTYPE]))
        return header("link", kind, link=draw(st.sampled_from(LINKS))) + header("link/x", size=1) + padded(b"x")
    if how == "size":
        made = header(name, size=0)
        size = draw(st.sampled_from(SIZES))
        octal = b"%011o\0" % size if 0 <= size < 8**11 else tarfile.itn(size, 12, tarfile.GNU_FORMAT)
        return made[:-512] + with_checksum(made[-512:][:124] + octal + made[-512:][136:]) + padded(content)
    if how == "pax":
        text = draw(st.sampled_from(PAX))
        kind = draw(st.sampled_from([tarfile.XHDTYPE, tarfile.XGLTYPE]))
        return header("pax", kind, len(text)) + padded(text) + header(name, size=0)
    made = header(name, size=len(content))
    if how == "field":
        at = draw(st.integers(0, 511))
        made = (
            made[:-512] + with_checksum(made[-512:][:at] + draw(st.binary(min_size=1, max_size=8)) + made[-512:])[:512]
        )
    return made + padded(content)


@st.composite
def archives(draw):
    content = b"".join(draw(members()) for _ in range(draw(st.integers(0, 4)))) + b"\0" * 1024
    return draw(damaged(content)) if draw(st.integers(0, 3)) == 0 else content


def files_below(directory):
    """Relative names with kinds and contents of everything that is there."""
    found = {}
    for folder, folders, names in os.walk(directory):
        for name in [*folders, *names]:
            path = os.path.join(folder, name)
            kind = "link" if os.path.islink(path) else "folder" if os.path.isdir(path) else "file"
            found[os.path.relpath(path, directory)] = kind, Path(path).read_bytes() if kind == "file" else b""
    return found


class Receiver:
    """A directory of archives with an honest one, inside a directory that must stay as it is."""

    def __init__(self, root):
        self.root, self.cache = root, root / "cache" / "code"
        source = root / "source"
        for name in NAMES:
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes(name.encode())
        (source / "model.py").chmod(0o755)
        self.honest = pack_files(source, NAMES, root / "packed")
        self.receive(self.honest, (root / "packed" / archive_name(self.honest)).read_bytes())
        self.before = files_below(root)

    def receive(self, archive, content):
        """The directory, or None if it was refused."""
        with code_directory(self.cache, archive) as (target, is_missing):
            if is_missing:
                unpack_code(io.BytesIO(content), archive, target)
        return target

    def check(self, archive, content):
        """Whether it was taken. Nothing else has changed, and there are only files."""
        made = {}
        try:
            made = files_below(self.receive(archive, content))
        except WrongCodeError:
            pass
        except OSError as failure:
            if failure.errno != errno.ENAMETOOLONG:  # the callers have words for it
                raise
        assert {kind for kind, _ in made.values()} <= {"folder", "file"}
        assert sum(len(data) for _, data in made.values()) <= len(content)
        own = self.cache / archive.sha256
        if is_taken := own.exists():
            shutil.rmtree(own)
        own.with_suffix(".lock").unlink()
        assert files_below(self.root) == self.before
        return is_taken


def announced(content, size_bytes=None):
    return CodeArchive(sha256=hashlib.sha256(content).hexdigest(), size_bytes=size_bytes or len(content))


@pytest.fixture
def receiver(tmp_path):
    return Receiver(tmp_path)


@pytest.mark.parametrize("count", [FEW, *long_only(MANY)])
def test_archives_write_their_own_directory_only(receiver, count):
    read, taken = [], []

    @examples(count)
    @given(archives())
    def attack(content):
        read.append(content)
        taken.append(receiver.check(announced(content), content))

    attack()
    assert len(read) >= count
    assert len(set(read)) > count // 2
    assert count // 10 < sum(taken) < len(taken)


def test_what_was_packed_arrives(receiver):
    found = files_below(receiver.cache / receiver.honest.sha256)
    assert {name: data for name, (kind, data) in found.items() if kind == "file"} == {n: n.encode() for n in NAMES}
    assert (receiver.cache / receiver.honest.sha256 / "model.py").stat().st_mode & 0o777 == 0o755
    assert (receiver.cache / receiver.honest.sha256 / "empty").stat().st_mode & 0o777 == 0o644


LYING = {
    "another content": lambda content: (announced(content), content + b"\0"),
    "a wrong size": lambda content: (announced(content, 7), content),
    "a link that is written through": lambda content: (
        announced(made := header("d", tarfile.SYMTYPE, link="../../..") + header("d/outside", size=1) + padded(b"x")),
        made,
    ),
    "a name above": lambda content: (announced(made := header("../outside", size=1) + padded(b"x")), made),
    "a name from the root": lambda content: (announced(made := header("/tmp/outside", size=1) + padded(b"x")), made),
    "the same name twice": lambda content: (announced(made := header("a") * 2), made),
    "a size below zero": lambda content: (announced(made := negative()), made),
    "a sparse file": lambda content: (announced(made := header("a", tarfile.GNUTYPE_SPARSE)), made),
    "too many files": lambda content: (announced(made := header("a", tarfile.GNUTYPE_LONGNAME) * 3), made),
}


def negative():
    made = header("a")
    return with_checksum(made[:124] + tarfile.itn(-512, 12, tarfile.GNU_FORMAT) + made[136:])


@pytest.mark.parametrize("how", LYING)
def test_an_archive_that_lies_is_refused(receiver, how):
    archive, content = LYING[how]((receiver.root / "packed" / archive_name(receiver.honest)).read_bytes()[:-512])
    with pytest.raises(WrongCodeError):
        receiver.receive(archive, content)
    assert not receiver.check(archive, content)


def test_an_archive_with_too_many_files_is_refused(receiver, monkeypatch):
    monkeypatch.setattr("shoal.spec.remote.code_directory.MAX_CODE_FILES", 2)
    content = b"".join(header(str(n)) for n in range(6))
    with pytest.raises(WrongCodeError, match="too many files"):
        receiver.receive(announced(content), content)
    assert MAX_CODE_FILES > 2


# ---- the code beside an exported model ----


@st.composite
def zips(draw):
    """An archive of code with names and sizes that lie, sometimes damaged."""
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w") as made:
        for _ in range(draw(st.integers(0, 3))):
            name = draw(st.sampled_from([*NAMES, *NASTY_NAMES]))
            method = draw(
                st.sampled_from([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
            )
            info = zipfile.ZipInfo(name.encode("utf-8", "replace").decode() or "x")
            info.compress_type = method
            made.writestr(info, draw(st.sampled_from([b"", b"print(1)", b"\0" * 100_000])))
    content = bytearray(target.getvalue())
    if draw(st.booleans()):
        return draw(damaged(bytes(content)))
    for _ in range(draw(st.integers(0, 4))):  # in the directory at its end, where sizes, methods and places stand
        at = draw(st.integers(0, min(len(content), 300) - 1))
        content[-1 - at] = draw(st.integers(0, 255))
    return bytes(content)


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize("count", [FEW, *long_only(MANY // 4)])
def test_the_code_beside_a_model_writes_its_own_directory_only(tmp_path, count):
    model, cache = tmp_path / "model", tmp_path / "cache"
    model.mkdir()
    read, taken = [], []

    @examples(count)
    @given(zips())
    def attack(content):
        (model / model_code.CODE).write_bytes(content)
        read.append(content)
        try:
            made = model_code.unpack_code(model, cache)
            taken.append(content)
            assert made == cache / "model-code" / hashlib.sha256(content).hexdigest()
        except ShoalError as failure:
            if failure.code != "SH811":
                raise
        assert {path.name for path in tmp_path.iterdir()} <= {"model", "cache"}
        assert not cache.exists() or {path.name for path in cache.iterdir()} <= {"model-code"}

    attack()
    assert len(read) >= count
    assert count // 10 < len(taken) < len(read)
