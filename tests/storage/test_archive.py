"""Archives of runs: copied, read back, compared; brought back as they were."""

import hashlib
import json
from pathlib import Path

import fsspec
import pytest

from shoal.errors import ShoalError
from shoal.jobs import run_dir
from shoal.spec.run_paths import RunPaths
from shoal.storage import archive
from tests.jobs.past_run import call_verb, write_run


@pytest.fixture
def paths(tmp_path):
    one = write_run(tmp_path / "runs" / "mlp-1")
    one.model.mkdir()
    (one.model / "model.safetensors").write_bytes(bytes(range(256)) * 9000)  # more than one piece
    one.logs.mkdir()
    one.log(0).write_text("said\n")
    one.driver_address.write_text('{"token": "secret"}')
    (one.root / "elsewhere").symlink_to("/etc/passwd")
    return one


def content(root):
    return {
        path.relative_to(root).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(root.rglob("*"))
        if path.is_file() and not path.is_symlink() and not path.name.startswith(".")
    }


def test_a_run_goes_to_a_url_and_comes_back_the_same(paths, tmp_path, capsys, monkeypatch):
    before, url = content(paths.root), f"file://{tmp_path}/far/away"
    words = ("archive", "mlp-1", "--to", url, "--free", "--runs", tmp_path / "runs")
    code, out, err = call_verb(capsys, monkeypatch, *words)
    assert code == 0, err
    assert "each read back and compared" in out
    assert not paths.root.exists()
    there = content(tmp_path / "far" / "away" / "mlp-1")
    assert there.pop(archive.LIST)
    assert there == before  # no token, no lock, no link
    code, _, err = call_verb(capsys, monkeypatch, "fetch", f"{url}/mlp-1", "--runs", tmp_path / "runs")
    assert code == 0, err
    assert content(paths.root) == before
    assert call_verb(capsys, monkeypatch, "show", "mlp-1", "--runs", tmp_path / "runs")[0] == 0
    assert call_verb(capsys, monkeypatch, "fetch", f"{url}/mlp-1", "--runs", tmp_path / "runs")[0] == 6  # it is here


def test_the_same_archive_again_is_compared_and_another_is_not_overwritten(paths):
    url = f"memory://{paths.root.parent.parent.name}"
    assert archive.archive_run(paths, url) == archive.archive_run(paths, url)
    paths.log(0).write_text("said more\n")
    with pytest.raises(ShoalError, match="another archive") as refused:
        archive.archive_run(paths, url)
    assert refused.value.code == "SH681"


def test_a_store_that_loses_a_bit_is_noticed(paths, monkeypatch):
    """Without the reading back, the run would go to the trash, and its archive would be damaged."""
    url = f"memory://flipped-{paths.root.parent.parent.name}"
    fs = fsspec.filesystem("memory")
    write = archive._Place.write

    def damaged(place, path, file):
        write(place, path, file)
        if path == "model/model.safetensors":
            full = f"{place._root}/{path}"
            stored = bytearray(fs.cat_file(full))
            stored[1_500_000] ^= 1
            fs.pipe_file(full, bytes(stored))

    monkeypatch.setattr(archive._Place, "write", damaged)
    with pytest.raises(ShoalError, match="came back changed"):
        archive.archive_run(paths, url)
    with pytest.raises(ShoalError, match="no archive"):  # the list is written last
        archive.fetch_run(f"{url}/mlp-1", paths.root.parent.parent / "other")


@pytest.mark.parametrize("path", ["../evil", "/evil", "a/../../evil", ".control.json", "a/.ssh/x", "a/..\\evil"])
def test_an_archive_writes_nothing_outside_its_run(tmp_path, path):
    place = tmp_path / "far" / "mlp-1"
    place.mkdir(parents=True)
    there = Path(f"{place}/{path}")  # the archive has such a file: only its name is refused
    there.parent.mkdir(parents=True, exist_ok=True)
    (place / "a").mkdir(exist_ok=True)
    there.touch()
    one = {"path": path, "size_bytes": 0, "sha256": hashlib.sha256().hexdigest()}
    (place / archive.LIST).write_text(json.dumps({"run": "mlp-1", "version": 1, "files": [one]}))
    (tmp_path / "runs").mkdir()
    with pytest.raises(ShoalError) as refused:
        archive.fetch_run(f"file://{place}", tmp_path / "runs")
    assert refused.value.code == "SH681"
    assert list((tmp_path / "runs").iterdir()) == []


def test_a_damaged_archive_leaves_nothing_here(paths, tmp_path):
    url = f"file://{tmp_path}/far"
    archive.archive_run(paths, url)
    stored = tmp_path / "far" / "mlp-1" / "model" / "model.safetensors"
    stored.write_bytes(stored.read_bytes() + b"x")
    (tmp_path / "other").mkdir()
    with pytest.raises(ShoalError, match="damaged in the archive"):
        archive.fetch_run(f"{url}/mlp-1", tmp_path / "other")
    assert list((tmp_path / "other").iterdir()) == []


def test_a_driven_run_and_an_unknown_url_are_refused(paths, tmp_path):
    with run_dir.driver_lock(paths), pytest.raises(ShoalError) as driven:
        archive.archive_run(RunPaths(paths.root), f"file://{tmp_path}/far")
    assert driven.value.code == "SH602"
    with pytest.raises(ShoalError) as unknown:
        archive.archive_run(paths, "nowhere://bucket")
    assert unknown.value.code == "SH681"


@pytest.mark.parametrize("paths", [[], ["job.yaml", "job.yaml"], ["a/b", "a//b"], ["a", "a/b"]])
def test_a_list_that_is_no_tree_is_refused(tmp_path, paths):
    place = tmp_path / "far" / "mlp-1"
    place.mkdir(parents=True)
    files = [{"path": path, "size_bytes": 0, "sha256": hashlib.sha256().hexdigest()} for path in paths]
    (place / archive.LIST).write_text(json.dumps({"run": "mlp-1", "version": 1, "files": files}))
    for path in paths[:1]:
        (place / path).parent.mkdir(exist_ok=True)
        (place / path).touch()
    (tmp_path / "runs").mkdir()
    with pytest.raises(ShoalError) as refused:
        archive.fetch_run(f"file://{place}", tmp_path / "runs")
    assert refused.value.code == "SH681"
    assert list((tmp_path / "runs").iterdir()) == []
