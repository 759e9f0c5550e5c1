"""A state fits any layout: what some wrote is read by others, however they cut the model, bit for bit."""

import json

import pytest
import torch

from shoal.checkpoint.boxes import Box
from shoal.checkpoint.files import open_files
from shoal.checkpoint.pieces import Row, Saved, save
from shoal.errors import ShoalError
from shoal.parallel.shard.held import Gathered, Held, Piece, load, load_settings, pieces_of, settings_of
from tests.conftest import long
from tests.parallel.shard.crew import MODELS, adamw, alone, crew, sgd, sharded, train
from tests.parallel.shard.test_training import options_for


def copied(held, optimizer):
    return {name: Piece(p.box, p.values.clone()) for name, p in pieces_of(held, optimizer).items()}


def assembled(found):
    """Every tensor in full, from the pieces of all."""
    pieces = Gathered(found)
    whole = {}
    for name in pieces.names():
        boxes = pieces.boxes(name)
        whole[name] = torch.empty(boxes[0].shape, dtype=pieces.read(name, 0).dtype)
        for number, box in enumerate(boxes):
            box.of(whole[name]).copy_(pieces.read(name, number))
    return whole


def equal(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def taken_over(kind, name, make, ways, pieces):
    """What members of this layout hold after they took over, and what one more step makes of it."""

    def act(grid):
        replica = sharded(grid, kind, name, optimizer=make, **options_for(kind, name))
        load(replica.held, pieces, replica.optimizer)
        before = copied(replica.held, replica.optimizer)
        train(replica, name, 1, first=2)
        return before, copied(replica.held, replica.optimizer)

    results = crew(ways, act)
    return [before for before, _ in results], [after for _, after in results]


def by_one(name, make, found):
    """A single process takes over."""
    model = MODELS[name]()
    held, optimizer = Held.whole(model), make(model)
    load(held, Gathered(found), optimizer)
    return [pieces_of(held, optimizer)]


@pytest.mark.parametrize(
    ("name", "make"), [("tied", adamw), ("normed", sgd), *long(("encoder", adamw), ("frozen", adamw), ("gpt", sgd))]
)
def test_from_fsdp_on_four_to_one_to_tensor_on_two_to_pipeline_on_two(name, make):
    def begin(grid):
        replica = sharded(grid, "fsdp", name, optimizer=make)
        train(replica, name, 2)
        return copied(replica.held, replica.optimizer)

    found = crew(4, begin)
    first = assembled(found)
    assert any(key.startswith("/optimizer/") for key in first)
    found = by_one(name, make, found)
    assert equal(assembled(found), first)
    for kind in ("tensor", "pipeline"):
        before, found = taken_over(kind, name, make, 2, Gathered(found))
        assert equal(assembled(before), first)
        first = assembled(found)
    assert equal(assembled(by_one(name, make, found)), first)


def test_through_files_each_with_its_own_part(tmp_path):
    def write(grid):
        replica = sharded(grid, "fsdp", "gpt", optimizer=adamw)
        train(replica, "gpt", 1)
        rows, blobs = save(open_files(tmp_path), pieces_of(replica.held, replica.optimizer))
        told = json.dumps([row.describe() for row in rows])
        return told, blobs, copied(replica.held, replica.optimizer), settings_of(replica.optimizer)

    written = crew(4, write)
    rows = [Row.from_description(row) for told, *_ in written for row in json.loads(told)]
    sizes = open_files(tmp_path).sizes("blobs")
    assert sum(sizes.values()) == sum(size for _, blobs, *_ in written for size in blobs.values())
    saved = Saved(open_files(tmp_path), rows)
    before, _ = taken_over("tensor", "gpt", adamw, 2, saved)
    assert equal(assembled(before), assembled([pieces for _, _, pieces, _ in written]))

    model = MODELS["gpt"]()
    optimizer = adamw(model)
    load_settings(optimizer, [{"lr": 0.5}])
    load_settings(optimizer, written[0][3])
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
    found = crew(2, lambda grid: pieces_of(sharded(grid, kind, name, **options).held))
    replica, _ = alone(name, 0)
    assert equal(assembled(found), assembled([pieces_of(Held.whole(replica.model))]))


def test_a_state_with_a_hole_is_refused():
    model = MODELS["mlp"]()
    pieces = pieces_of(Held.whole(model))
    name = "/model/2.weight"
    half = Piece(Box((32, 32), (0, 0), (16, 32)), pieces[name].values[:16])
    with pytest.raises(ShoalError, match="512 of 1024 values of '/model/2") as caught:
        load(Held.whole(model), Gathered([pieces | {name: half}]))
    assert caught.value.code == "SH406"
    other = Piece(Box.whole((31, 32)), pieces[name].values[:31])
    with pytest.raises(ShoalError, match=r"is \[31, 32\] there and \[32, 32\] in the model"):
        load(Held.whole(model), Gathered([pieces | {name: other}]))


def test_damage_is_found(tmp_path):
    files = open_files(tmp_path)
    rows, _ = save(files, pieces_of(Held.whole(MODELS["mlp"]())))
    path = next(iter(files.sizes("blobs")))
    content = bytearray((tmp_path / path).read_bytes())
    content[-1] ^= 1
    (tmp_path / path).write_bytes(content)
    with pytest.raises(ShoalError, match="SHA-256"):
        load(Held.whole(MODELS["mlp"]()), Saved(files, rows))
    (tmp_path / path).unlink()
    with pytest.raises(ShoalError) as caught:
        load(Held.whole(MODELS["mlp"]()), Saved(files, rows))
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
    assert Row.from_description(GOOD).box == Box((4, 2), (2, 0), (2, 2))
    with pytest.raises(ValueError, match="piece"):
        Row.from_description(GOOD | change)
    with pytest.raises(ValueError, match="piece"):
        Row.from_description("nonsense")


class Counts(torch.optim.SGD):
    """Keeps a number that is no tensor."""

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["step"] = self.state[p].get("step", 0) + 1


def test_a_state_that_would_be_lost_is_refused():
    model = MODELS["mlp"]()
    held = Held.whole(model)
    optimizer = Counts(held.bare.parameters())
    pieces_of(held, optimizer)
    optimizer.step()
    with pytest.raises(ShoalError, match=r"'step' of '0.weight' as int") as caught:
        pieces_of(held, optimizer)
    assert caught.value.code == "SH506"
