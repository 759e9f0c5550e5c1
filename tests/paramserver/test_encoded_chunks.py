"""With any codec servers hold equal shares, and decode the same values, wherever chunks end."""

import pytest
import torch
from torch import nn

from shoal.collectives import buckets
from shoal.collectives.buckets import EncodedLayout
from shoal.lanes.flat_layout import FlatLayout, LaneSum
from shoal.net.errors import LinkError
from shoal.paramserver.encoded_chunks import EncodedChunks
from shoal.plan.chunk_placement import ChunkPlacement
from shoal.spec.chunk_table import build_pieces
from shoal.spec.view import Address

CODECS = [
    {"kind": "bf16"},
    {"kind": "fp16"},
    {"kind": "int8", "block": 256},
    {"kind": "int4", "block": 32},
    {"kind": "int3", "block": 32},
    {"kind": "sign"},
    {"kind": "topk", "keep": 0.1},
    {"kind": "lowrank", "rank": 2},
]
MODELS = {
    "mlp": lambda: [nn.Linear(784, 128), nn.Linear(128, 128), nn.Linear(128, 10)],
    "one matrix": lambda: [nn.Linear(700, 700, bias=False)],
    "two buckets in one piece": lambda: [nn.Linear(100, 100), nn.Linear(400, 350)],
    "many layers": lambda: [nn.Linear(96, 97) for _ in range(20)],
    "small": lambda: [nn.Linear(3, 2)],
}
named = pytest.mark.parametrize("codec", CODECS, ids=lambda it: it["kind"])


def layout_of(model):
    parameters = [p for layer in MODELS[model]() for p in layer.parameters()]
    loss = torch.zeros((), dtype=torch.float64)
    return FlatLayout(LaneSum([p.detach() for p in parameters], [torch.zeros(5)], [], loss, loss))


def table_of(chunks, servers, *, backups=0):
    placement = ChunkPlacement(servers=servers, backups=backups)
    placement.set_boundaries(chunks.offsets)
    for seat in range(servers):
        placement.arrived(seat, Address(host="here", port=seat + 1))
    return placement.decide()


def primary_bytes(table):
    held = dict.fromkeys(range(len(table.addresses)), 0)
    for piece in build_pieces(table):
        held[piece.primary] += piece.stop - piece.start
    return list(held.values())


@named
@pytest.mark.parametrize("model", [name for name in MODELS if name != "small"])
def test_equal_shares(codec, model):
    layout = layout_of(model)
    chunks = EncodedChunks(EncodedLayout(layout, codec), cut_tensors=True)
    for servers in (2, 3, 4):
        held = primary_bytes(table_of(chunks, servers))
        mean = layout.size_bytes / servers
        assert 0.88 * mean < min(held) <= max(held) < 1.12 * mean, (servers, held)


@named
@pytest.mark.parametrize("model", MODELS)
def test_clipping_by_norm_has_the_slices_of_lanes(codec, model):
    """A norm is that of a whole tensor, on servers and in the exchange of workers."""
    encoded_layout, theirs = EncodedLayout(layout_of(model), codec), layout_of(model)
    theirs.chunk_offsets = encoded_layout.chunk_offsets
    ours = layout_of(model)
    ours.chunk_offsets = EncodedChunks(encoded_layout, cut_tensors=False).offsets
    assert [part[1:] for part in ours.slices] == [part[1:] for part in theirs.slices]


@named
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("cut_tensors", [True, False])
def test_servers_decode_what_lanes_encode(codec, model, cut_tensors):
    layout = layout_of(model)
    encoded_layout = EncodedLayout(layout, codec)
    chunks = EncodedChunks(encoded_layout, cut_tensors=cut_tensors)
    lanes, expected = [], []
    for lane in range(2):
        flat = torch.zeros(layout.size_bytes, dtype=torch.uint8)
        generator = torch.Generator().manual_seed(lane)
        for grad in layout.views(flat).grads:
            grad.normal_(generator=generator)
        flat[layout.tail :] = lane + 1
        lanes.append(torch.zeros(encoded_layout.lane_bytes, dtype=torch.uint8))
        encoded_layout.encode(flat, lanes[-1], None)
        for bucket in encoded_layout.buckets:
            bucket.codec.decode(bucket.encoded_bytes(lanes[-1]), bucket.values(flat))
        expected.append(flat)
    for servers in (1, 3):
        found = [torch.full_like(flat, 255) for flat in expected]
        for piece in build_pieces(table_of(chunks, servers)):
            data = torch.cat([part for lane in lanes for part in chunks.parts(piece, lane)])
            assert len(data) <= 2 * chunks.max_bytes(piece)
            chunks.decode(piece, data, found)
            with pytest.raises(LinkError, match="bytes"):
                chunks.decode(piece, torch.cat([data, torch.zeros(4, dtype=torch.uint8)]), found)
            with pytest.raises(LinkError):
                chunks.decode(piece, data[:-1].clone(), found)
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one, other)


def test_small_buckets_share_a_piece(monkeypatch):
    """A piece may have several buckets: each of them is decoded."""
    monkeypatch.setattr(buckets, "BUCKET_BYTES", 4096)
    monkeypatch.setattr(buckets, "FIRST_BUCKET_BYTES", 4096)
    test_servers_decode_what_lanes_encode({"kind": "int8", "block": 256}, "many layers", True)
