from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.checkpoint.manifest import (
    Manifest,
    TensorRef,
    list_manifests,
    newest_manifest,
    parse_manifest,
    steps_to_delete,
)
from shoal.errors import CheckpointError

DIGEST = hashlib.sha256(b"blob").hexdigest()
MANIFEST = Manifest(
    step=7,
    created=1.5,
    job_sha256="abc",
    metric=0.25,
    tree={"dict": [["w", {"tensor": "/w"}]]},
    blobs={DIGEST: 80},
    tensors={"/w": TensorRef(DIGEST, "tensor", "F32", (2, 3))},
    info={"epoch": 1},
)


def forged(**changes) -> bytes:
    """A manifest with other fields and a checksum that is right."""
    body = json.loads(MANIFEST.dump())["body"] | changes
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return json.dumps({"format": 1, "sha256": hashlib.sha256(text.encode()).hexdigest(), "body": body}).encode()


@pytest.mark.parametrize("metric", [None, 0.25, -0.0, float("inf"), float("-inf")])
def test_a_manifest_comes_back(metric):
    manifest = replace(MANIFEST, metric=metric)
    assert parse_manifest(manifest.dump()) == manifest


def test_a_metric_that_is_no_number_comes_back():
    assert str(parse_manifest(replace(MANIFEST, metric=float("nan")).dump()).metric) == "nan"


@given(st.integers(0, len(MANIFEST.dump()) - 1), st.integers(0, 7))
def test_no_flipped_bit_goes_unseen(position, bit):
    raw = bytearray(MANIFEST.dump())
    raw[position] ^= 1 << bit
    with pytest.raises(CheckpointError) as caught:
        parse_manifest(bytes(raw))
    assert caught.value.code in ("SH502", "SH507")


@given(st.integers(0, len(MANIFEST.dump()) - 1))
def test_a_truncated_manifest_is_damaged(length):
    with pytest.raises(CheckpointError) as caught:
        parse_manifest(MANIFEST.dump()[:length])
    assert caught.value.code == "SH502"


@given(st.binary(max_size=50) | st.text(max_size=50).map(str.encode))
def test_garbage_is_damaged(raw):
    with pytest.raises(CheckpointError) as caught:
        parse_manifest(raw)
    assert caught.value.code == "SH502"


def test_an_edited_manifest_is_damaged():
    with pytest.raises(CheckpointError, match="checksum does not match"):
        parse_manifest(MANIFEST.dump().replace(b'"step":7', b'"step":8'))


@pytest.mark.parametrize(
    "changes",
    [
        {"step": -1}, {"step": True}, {"step": 1.0}, {"step": 2**70}, {"blobs": {"../../etc": 1}},
        {"blobs": []},
        {"blobs": {DIGEST: -1}}, {"blobs": {}}, {"tensors": {"/w": [DIGEST, "t", "F32", [-1]]}},
        {"tensors": 3},
        {"tensors": {"/w": [DIGEST, "t", "F32"]}}, {"tensors": {"/w": [DIGEST, 1, "F32", []]}},
        {"created": "x"},
        {"tensors": {"/w": [[], "t", "F32", []]}}, {"metric": {}}, {"info": []}, {"job_sha256": 1},
    ],
)  # fmt: skip
def test_a_hostile_manifest_with_a_right_checksum_is_damaged(changes):
    assert parse_manifest(forged()) == MANIFEST
    with pytest.raises(CheckpointError) as caught:
        parse_manifest(forged(**changes))
    assert caught.value.code == "SH502"


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"step": 2**70}, r"step is or contains 1180591620717411303424, not a whole number"),
        ({"blobs": {"../../etc": 1}}, r"blobs has the name '\.\./\.\./etc', which is not a SHA-256"),
        ({"blobs": {"/etc/passwd": 1}}, r"blobs has the name '/etc/passwd'"),
        ({"blobs": {"\x1b[2J": 1}}, r"blobs has the name '\\x1b\[2J'"),
        ({"blobs": {DIGEST: 10**30}}, rf"blobs\['{DIGEST[:60]}.*not a whole number"),
        ({"tensors": {"/w": [DIGEST, "t", "F32", [-4]]}}, r"tensors\['/w'\] is or contains -4"),
        ({"tensors": {"/w": ["0" * 64, "t", "F32", []]}}, r"tensors\['/w'\] refers to a blob that is not listed"),
        ({"tensors": []}, "tensors is not an object"),
        ({"created": 10**400}, "too large"),
        ({"metric": "many"}, "metric is 'many', not a number"),
    ],
)
def test_the_field_that_is_wrong_is_named(changes, told):
    with pytest.raises(CheckpointError, match=told):
        parse_manifest(forged(**changes), where="store/manifests/1.json")


@pytest.mark.parametrize("raw", [b"[" * 100_000, b'{"a":' * 100_000, b"9" * 100_000, b'{"format":1,"body":NaN}'])
def test_json_that_hurts_parsers_is_damaged(raw):
    with pytest.raises(CheckpointError) as caught:
        parse_manifest(raw)
    assert caught.value.code == "SH502"


def test_a_newer_format_is_not_called_damaged():
    with pytest.raises(CheckpointError) as caught:
        parse_manifest(replace(MANIFEST, format=2).dump())
    assert caught.value.code == "SH507"


@pytest.mark.parametrize(
    ("metas", "keep", "keep_best", "sign", "dropped"),
    [
        ([], 2, 1, -1, []),
        ([(1, None), (2, None), (3, None)], 2, 1, -1, [1]),
        ([(1, 0.1), (2, 0.5), (3, 0.4), (4, 0.3)], 2, 1, -1, [2]),
        ([(1, 0.1), (2, 0.5), (3, 0.4), (4, 0.3)], 2, 1, 1, [1]),
        ([(1, 0.1), (2, 0.5), (3, 0.4), (4, 0.3)], 1, 0, -1, [1, 2, 3]),
        ([(1, float("nan")), (2, 0.5), (3, None)], 1, 1, -1, [1]),
        ([(1, 0.5), (2, 0.5), (3, 0.9)], 1, 1, -1, [2]),
        ([(1, 0.5), (2, 0.5), (3, 0.9)], 1, 1, 1, [1, 2]),
        ([(1, float("-inf")), (2, 0.5), (3, 0.9)], 1, 1, -1, [2]),
    ],
)
def test_what_retention_drops(metas, keep, keep_best, sign, dropped):
    assert steps_to_delete(reversed(metas), keep, keep_best, sign) == dropped


def test_the_driver_lists_manifests_without_torch(tmp_path):
    for step in (3, 12):
        target = tmp_path / "fold-1" / f"{step:012d}.json"
        target.parent.mkdir(exist_ok=True)
        target.write_bytes(replace(MANIFEST, step=step).dump())
    (tmp_path / "fold-1" / f"{20:012d}.json").write_bytes(b"half a mani")
    (tmp_path / "fold-1" / f"{30:012d}.json").write_bytes(MANIFEST.dump())  # of another step
    (tmp_path / "fold-1" / "notes.txt").write_text("not one")
    assert [m.step for m in list_manifests(tmp_path, name="fold-1")] == [12, 3]
    assert newest_manifest(tmp_path, name="fold-1").step == 12
    assert newest_manifest(tmp_path) is None
    assert list_manifests(tmp_path / "nowhere") == []
    code = "import sys, shoal.checkpoint.manifest; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("name", ["../up", "a/b", "blobs", ".hidden", " "])
def test_a_name_cannot_leave_the_store(tmp_path, name):
    with pytest.raises(ValueError, match="not a name"):
        list_manifests(tmp_path, name=name)
