from __future__ import annotations

import hashlib
import io

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.checkpoint.blobs import decode_blob, encode_blob, pack_tensors, safetensors_header, tensor_spec
from shoal.errors import CheckpointError

from .states import bit_equal, tensors

CONTENT = {"a": torch.arange(3.0), "b": torch.tensor([True])}
SPECS = {key: tensor_spec(tensor) for key, tensor in CONTENT.items()}


@given(st.dictionaries(st.text(min_size=1, max_size=4).map("/".__add__), tensors(), max_size=5))
@settings(deadline=None)
def test_a_blob_is_what_safetensors_reads(content):
    blob = encode_blob(content, metadata={"format": "pt"})
    raw = b"".join(blob.chunks)
    assert blob.size_bytes == len(raw)
    assert blob.digest == hashlib.sha256(raw).hexdigest()
    found = safetensors.torch.load(raw)
    assert found.keys() == content.keys()
    assert all(bit_equal(found[key], content[key]) for key in content)


@given(st.binary(max_size=200), st.booleans())
def test_no_hostile_blob_is_more_than_damage(raw, with_header):
    raw = safetensors_header(SPECS) + raw if with_header else raw
    with pytest.raises(CheckpointError) as caught:
        decode_blob(io.BytesIO(raw), SPECS, digest="0" * 64)
    assert caught.value.code == "SH502"


@pytest.mark.parametrize("shape", [(2**62,), (2**62, 2**62), (0, 2**62, 2**62), (1,) * 200])
@pytest.mark.parametrize("code", ["F32", "F33", ""])
def test_no_spec_makes_it_allocate_what_the_file_does_not_have(shape, code):
    with pytest.raises(CheckpointError) as caught:
        decode_blob(io.BytesIO(b"x" * 100), {"a": (code, shape)}, digest="0" * 64)
    assert caught.value.code == "SH502"


def test_an_impossible_shape_of_no_size_is_damage():
    spec = {"a": ("F32", (0, 2**62, 2**62))}
    with pytest.raises(CheckpointError, match="no tensor has the shape"):
        decode_blob(io.BytesIO(safetensors_header(spec)), spec, digest="0" * 64)


def test_large_tensors_are_blobs_of_their_own_and_small_ones_share_by_section():
    large, small = torch.zeros(16384), torch.zeros(16383)
    blobs, refs = pack_tensors(
        {"/m/a": large, "/m/b": small, "/m/c": small, "/o/d": small, "/o/e": large.clone(), "": small}
    )
    assert refs["/m/a"] == refs["/o/e"]
    assert refs["/m/b"].blob == refs["/m/c"].blob != refs["/o/d"].blob
    assert len(blobs) == 3  # "" and /o/d are each alone and equal
