"""A state fits any layout: what some wrote is read by others, however they cut the model, bit for bit."""

import json

import pytest
import torch

from shoal.checkpoint.files import open_files
from shoal.checkpoint.sharded_files import PieceRecord, SavedPieces, write_pieces
from shoal.checkpoint.slices import TensorSlice
from shoal.errors import ShoalError
from shoal.sharding.local_state import (
    LocalState,
    PiecesInMemory,
    TensorPiece,
    hyperparameters,
    load_hyperparameters,
    load_local_state,
    owned_pieces,
)
from tests.conftest import long_only
from tests.sharding.ranks import MODELS, adamw, run_ranks, sgd, sharded, single_process, train
from tests.sharding.test_training import options_for


def copy_pieces(held, optimizer):
    return {name: TensorPiece(p.tensor_slice, p.values.clone()) for name, p in owned_pieces(held, optimizer).items()}


def assembled(found):
    """Every tensor in full, from the pieces of all."""
    pieces = PiecesInMemory(found)
    whole = {}
    for name in pieces.names():
        boxes = pieces.slices(name)
        whole[name] = torch.empty(boxes[0].shape, dtype=pieces.read(name, 0).dtype)
        for number, box in enumerate(boxes):
            box.view_of(whole[name]).copy_(pieces.read(name, number))
    return whole


def equal(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def loaded_by_ranks(kind, name, make, ways, pieces):
    """What members of this layout hold after they took over, and what one more step makes of it."""

    def act(mesh):
        replica = sharded(mesh, kind, name, optimizer=make, **options_for(kind, name))
        load_local_state(replica.local_state, pieces, replica.optimizer)
        before = copy_pieces(replica.local_state, replica.optimizer)
        train(replica, name, 1, first=2)
        return before, copy_pieces(replica.local_state, replica.optimizer)

    results = run_ranks(ways, act)
    return [before for before, _ in results], [after for _, after in results]


def loaded_by_one(name, make, found):
    """A single process takes over."""
    model = MODELS[name]()
    held, optimizer = LocalState.unsharded(model), make(model)
    load_local_state(held, PiecesInMemory(found), optimizer)
    return [owned_pieces(held, optimizer)]


@pytest.mark.parametrize(
    ("name", "make"),
    [("tied", adamw), ("batch_normed", sgd), *long_only(("encoder", adamw), ("frozen", adamw), ("gpt", sgd))],
)
def test_from_fsdp_on_four_to_one_to_tensor_on_two_to_pipeline_on_two(name, make):
    def begin(mesh):
        replica = sharded(mesh, "fsdp", name, optimizer=make)
        train(replica, name, 2)
        return copy_pieces(replica.local_state, replica.optimizer)

    found = run_ranks(4, begin)
    first = assembled(found)
    assert any(key.startswith("/optimizer/") for key in first)
    found = loaded_by_one(name, make, found)
    assert equal(assembled(found), first)
    for kind in ("tensor", "pipeline"):
        before, found = loaded_by_ranks(kind, name, make, 2, PiecesInMemory(found))
        assert equal(assembled(before), first)
        first = assembled(found)
    assert equal(assembled(loaded_by_one(name, make, found)), first)


def test_through_files_each_with_its_own_part(tmp_path):
    def write(mesh):
        replica = sharded(mesh, "fsdp", "gpt", optimizer=adamw)
        train(replica, "gpt", 1)
        rows, blobs = write_pieces(open_files(tmp_path), owned_pieces(replica.local_state, replica.optimizer))
        told = json.dumps([row.to_dict() for row in rows])
        return told, blobs, copy_pieces(replica.local_state, replica.optimizer), hyperparameters(replica.optimizer)

    written = run_ranks(4, write)
    rows = [PieceRecord.from_dict(row) for told, *_ in written for row in json.loads(told)]
    sizes = open_files(tmp_path).sizes("blobs")
    assert sum(sizes.values()) == sum(size for _, blobs, *_ in written for size in blobs.values())
    saved = SavedPieces(open_files(tmp_path), rows)
    before, _ = loaded_by_ranks("tensor", "gpt", adamw, 2, saved)
    assert equal(assembled(before), assembled([pieces for _, _, pieces, _ in written]))

    model = MODELS["gpt"]()
    optimizer = adamw(model)
    load_hyperparameters(optimizer, [{"lr": 0.5}])
    load_hyperparameters(optimizer, written[0][3])
    assert optimizer.param_groups[0]["lr"] == 0.003


@pytest.mark.parametrize(
    ("kind", "name", "options"),
    [
        ("fsdp", "tied", {}),
        ("tensor", "tied", {}),
        ("pipeline", "tied", {}),
        ("fsdp", "given", {}),
        ("tensor", "given", {}),
        ("tensor", "given", {"patterns": "mlp"}),
        ("pipeline", "given", {}),
    ],
)
def test_the_first_weights_are_those_of_a_single_process(kind, name, options):
    found = run_ranks(2, lambda mesh: owned_pieces(sharded(mesh, kind, name, **options).local_state))
    replica, _ = single_process(name, 0)
    assert equal(assembled(found), assembled([owned_pieces(LocalState.unsharded(replica.model))]))


def test_a_state_with_a_hole_is_refused():
    model = MODELS["mlp"]()
    pieces = owned_pieces(LocalState.unsharded(model))
    name = "/model/2.weight"
    half = TensorPiece(TensorSlice((32, 32), (0, 0), (16, 32)), pieces[name].values[:16])
    with pytest.raises(ShoalError, match="512 of 1024 values of '/model/2") as caught:
        load_local_state(LocalState.unsharded(model), PiecesInMemory([pieces | {name: half}]))
    assert caught.value.code == "SH406"
    other = TensorPiece(TensorSlice.full((31, 32)), pieces[name].values[:31])
    with pytest.raises(ShoalError, match=r"is \[31, 32\] in the saved state and \[32, 32\] in the model"):
        load_local_state(LocalState.unsharded(model), PiecesInMemory([pieces | {name: other}]))


def test_damage_is_found(tmp_path):
    files = open_files(tmp_path)
    rows, _ = write_pieces(files, owned_pieces(LocalState.unsharded(MODELS["mlp"]())))
    path = next(iter(files.sizes("blobs")))
    content = bytearray((tmp_path / path).read_bytes())
    content[-1] ^= 1
    (tmp_path / path).write_bytes(content)
    with pytest.raises(ShoalError, match="SHA-256"):
        load_local_state(LocalState.unsharded(MODELS["mlp"]()), SavedPieces(files, rows))
    (tmp_path / path).unlink()
    with pytest.raises(ShoalError) as caught:
        load_local_state(LocalState.unsharded(MODELS["mlp"]()), SavedPieces(files, rows))
    assert caught.value.code == "SH502"


GOOD = {
    "name": "/model/a",
    "shape": [4, 2],
    "start": [2, 0],
    "size": [2, 2],
    "blob": "ab" * 32,
    "key": "t",
    "dtype": "F32",
}


@pytest.mark.parametrize(
    "change",
    [{"start": [3, 0]}, {"size": [2]}, {"start": [-1, 0]}, {"blob": "../x"}, {"size": [True, 2]}, {"key": 1}, {"x": 1}],
)
def test_rows_that_are_none(change):
    assert PieceRecord.from_dict(GOOD).tensor_slice == TensorSlice((4, 2), (2, 0), (2, 2))
    with pytest.raises(ValueError, match="piece"):
        PieceRecord.from_dict(GOOD | change)
    with pytest.raises(ValueError, match="piece"):
        PieceRecord.from_dict("nonsense")


class Counts(torch.optim.SGD):
    """Keeps a number that is no tensor."""

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["step"] = self.state[p].get("step", 0) + 1


def test_a_state_that_would_be_lost_is_refused():
    model = MODELS["mlp"]()
    held = LocalState.unsharded(model)
    optimizer = Counts(held.param_module.parameters())
    owned_pieces(held, optimizer)
    optimizer.step()
    with pytest.raises(ShoalError, match=r"'step' of '0.weight' as int") as caught:
        owned_pieces(held, optimizer)
    assert caught.value.code == "SH506"
