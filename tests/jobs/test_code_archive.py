"""The job's directory as an archive: what is in it, what is not, and what comes out on the other side."""

import os
import subprocess
import tarfile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.errors import ShoalError
from shoal.jobs.queue.access_tokens import TokenFile
from shoal.jobs.queue.queue_file import QueuePaths
from shoal.jobs.queue.queue_store import QueueStore
from shoal.jobs.remote import code_archive
from shoal.jobs.remote.code_archive import archive_name, find_code, pack_code
from shoal.jobs.run_index import list_summaries
from shoal.spec.run_paths import RunPaths
from shoal.storage.tags import change_tags
from shoal.storage.trash import move_to_trash


def write(root, **files):
    for name, text in files.items():
        path = root / name.replace("__", "/").replace("DOT", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_what_is_ignored_stays_here(tmp_path):
    write(
        tmp_path, modelDOTpy="1", data__largeDOTbin="2", data__keepDOTbin="3", sub__trainDOTpy="4", sub__logDOTtxt="5"
    )
    write(tmp_path, DOTgitignore="*.bin\n!keep.bin\n", DOTshoalignore="/sub/*.txt\n", sub__DOTgitignore="")
    assert find_code(tmp_path) == [
        ".gitignore", ".shoalignore", "data/keep.bin", "model.py", "sub/.gitignore", "sub/train.py",
    ]  # fmt: skip


def test_runs_environments_and_caches_stay_here(tmp_path):
    write(tmp_path, modelDOTpy="", DOTgit__HEAD="", env__pyvenvDOTcfg="", env__lib__x="")
    write(tmp_path, runs__a__jobDOTyaml="", runs__a__eventsDOTjsonl="", runs__a__weights="")
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "__pycache__" / "x.pyc").touch()
    assert find_code(tmp_path) == ["model.py"]


def test_what_shoal_keeps_beside_runs_stays_here(tmp_path):
    """Tokens and the queue are of this machine."""
    runs = tmp_path / "runs"
    write(tmp_path, modelDOTpy="", runs__a__jobDOTyaml="", runs__a__eventsDOTjsonl='{"t":1,"kind":"run_started"}\n')
    with QueueStore(QueuePaths.of(runs)):
        TokenFile(runs).create("ann", role="read", runs=[], expires_t=None)
        change_tags(runs, "a", add=["good"])
        list_summaries(runs)
        move_to_trash(RunPaths.at(runs / "a"), runs)
        assert find_code(tmp_path) == ["model.py"]
    assert set(os.listdir(runs)) >= {".queue", ".trash", ".tags.json", ".web-tokens.json"}


def test_links_and_special_files(tmp_path):
    elsewhere = tmp_path / "elsewhere"
    here = tmp_path / "here"
    write(elsewhere, dataDOTtxt="linked")
    write(here, modelDOTpy="")
    (here / "link.txt").symlink_to(elsewhere / "data.txt")
    (here / "folder").symlink_to(elsewhere)
    (here / "dead").symlink_to(here / "nothing")
    os.mkfifo(here / "pipe")
    archive = pack_code(here, tmp_path / "out")
    with tarfile.open(tmp_path / "out" / archive_name(archive)) as content:
        assert content.getnames() == ["link.txt", "model.py"]
        assert all(member.isfile() for member in content)


def test_equal_directories_have_one_archive(tmp_path):
    for name in ("one", "two"):
        write(tmp_path / name, aDOTpy="print(1)", sub__bDOTpy="2")
    os.utime(tmp_path / "one" / "a.py", (1, 1))
    first = pack_code(tmp_path / "one", tmp_path / "out")
    assert pack_code(tmp_path / "two", tmp_path / "out") == first
    assert [file.name for file in (tmp_path / "out").iterdir()] == [archive_name(first)]
    (tmp_path / "two" / "a.py").chmod(0o755)
    assert pack_code(tmp_path / "two", tmp_path / "out") != first


def test_a_large_directory_is_refused_with_what_is_large(tmp_path):
    write(tmp_path, modelDOTpy="")
    with (tmp_path / "weights.bin").open("wb") as file:
        file.truncate(code_archive.MAX_CODE_BYTES)
    with (tmp_path / "x.bin").open("wb") as file:
        file.truncate(1)
    with pytest.raises(ShoalError, match=r"SH655.*200 MB.*weights.bin \(210 MB\)"):
        pack_code(tmp_path, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    write(tmp_path, DOTgitignore="weights.bin")
    pack_code(tmp_path, tmp_path / "out")


def test_too_many_files_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(code_archive, "MAX_CODE_FILES", 3)
    for n in range(5):
        (tmp_path / f"{n}").touch()
    with pytest.raises(ShoalError, match=r"SH655.*more than 3 files"):
        find_code(tmp_path)


PATTERNS = st.sampled_from(["*.py", "a", "/a", "a/", "!a", "!*.py", "b/*", "**/b", "a/b.py", "#x", "", "\\!a", "c*"])
NAMES = ["a", "b.py", "c.py", "d/a", "d/b.py", "d/b/c.py", "b/a/a"]


@settings(max_examples=20)
@given(st.lists(PATTERNS, max_size=4), st.lists(PATTERNS, max_size=3))
def test_ignore_files_mean_what_git_means(tmp_path_factory, top, below):
    root = tmp_path_factory.mktemp("tree")
    for name in NAMES:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()
    (root / ".gitignore").write_text("\n".join(top))
    (root / "d" / ".gitignore").write_text("\n".join(below))
    git = ["git", "-c", "init.defaultBranch=main", "-C", str(root)]
    subprocess.run([*git, "init", "-q"], check=True)
    listed = subprocess.run(
        [*git, "ls-files", "--others", "--exclude-standard"], check=True, capture_output=True, text=True
    )
    assert find_code(root) == sorted(listed.stdout.splitlines())
