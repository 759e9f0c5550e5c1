"""One form of a state read as the other: written by one process, or by members that held the model together."""

import torch

from shoal.checkpoint.layout import (
    SharedSections,
    is_sharded,
    load_pieces,
    record_fields,
    sharded_state,
    whole_state,
)
from shoal.checkpoint.sharded_files import PieceRecord, write_pieces
from shoal.checkpoint.slices import TensorPiece, TensorSlice
from shoal.checkpoint.store import CheckpointStore

LOOP = {"step": 3, "metrics": {}}
GROUPS = [{"lr": 0.1, "params": [0, 1]}]


def store(path):
    return CheckpointStore(str(path), job_sha256="a" * 64, every="never", emit=lambda *_, **__: None)


def saved_whole(path):
    optimizer = {"state": {0: {"momentum": torch.ones(2)}, 1: {"momentum": torch.zeros(3)}}, "param_groups": GROUPS}
    held = {"model": {"w": torch.arange(2.0), "b": torch.arange(3.0)}, "optimizer": optimizer, "schedule": {"at": 1}}
    made = store(path)
    made.save(3, whole_state(held, LOOP, {"clocks": None}))
    made.wait()
    return made


def saved_by_members(path):
    made = store(path)
    values = torch.arange(4.0)
    halves = [TensorPiece(TensorSlice((4,), (start,), (2,)), values[start : start + 2]) for start in (0, 2)]
    written = [write_pieces(made.files, {"/model/w": half}) for half in halves]
    records = [record for rows, _ in written for record in rows]
    shared = {"settings": [{"lr": 0.1}], "schedule": {"at": 1}, "layout": {"shard": "fsdp", "ways": 2}, "loop": LOOP}
    blobs = {blob: size for _, sizes in written for blob, size in sizes.items()}
    made.save_sharded(3, lambda: sharded_state(shared, records, {"w": "w"}), metric=None, external_blobs=lambda: blobs)
    made.wait()
    return made


def test_a_whole_state_is_told_from_pieces(tmp_path):
    assert not is_sharded(saved_whole(tmp_path / "whole").load(3)[1])
    assert is_sharded(saved_by_members(tmp_path / "members").load(3)[1])


def test_what_the_sync_keeps_lies_in_the_section_of_the_loop(tmp_path):
    state = saved_whole(tmp_path).load(3)[1]
    assert state["loop"] == {**LOOP, "sync": {"clocks": None}}
    assert whole_state({}, LOOP, None) == {"loop": {**LOOP, "sync": None}}


def test_members_read_what_members_wrote(tmp_path):
    made = saved_by_members(tmp_path)
    shared = SharedSections.load(made, 3)
    assert (shared.loop, shared.schedule, shared.layout["ways"]) == (LOOP, {"at": 1}, 2)
    pieces, settings = load_pieces(made, 3, param_order=["w"])
    assert settings == [{"lr": 0.1}]
    assert list(pieces.names()) == ["/model/w"]
    assert [one.start for one in pieces.slices("/model/w")] == [(0,), (2,)]


def test_members_read_what_one_process_wrote(tmp_path):
    """By the names of parameters, where an optimizer's state has their numbers; and its settings without them."""
    made = saved_whole(tmp_path)
    shared = SharedSections.load(made, 3)
    assert (shared.schedule, shared.layout) == ({"at": 1}, None)
    pieces, settings = load_pieces(made, 3, param_order=["w", "b"])
    assert settings == [{"lr": 0.1}]
    assert set(pieces.names()) == {"/model/w", "/model/b", "/optimizer/w/momentum", "/optimizer/b/momentum"}


def test_a_record_survives_a_message():
    record = PieceRecord("/model/w", (4,), (0,), (2,), "b" * 64, "w", "float32")
    fields = record_fields(record)
    assert fields["shape"] == [4]
    assert PieceRecord.from_dict(fields) == record
