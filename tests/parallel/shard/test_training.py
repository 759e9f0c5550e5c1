"""Sharded training agrees with a single process within the accuracy of float32, and repeats exactly.

The bound: a layout adds the same products in another order, so every gradient is off by a few units in the last place
of its largest summands, 2^-24 relative to them. Three digits are left for sums of up to some hundred summands, for
layers through which errors go on, and for steps that add up: each tensor is within 2^-24 * 64 of its largest value
after one step, and ten times that after ten. That is for SGD with momentum, where an update is proportional to the
gradient. AdamW divides a gradient by its own size: where that is nothing but rounding (a key's bias in attention) a
step has the full learning rate in either direction. So the bound is on the loss, and on the weights if eps is 0.01.
"""

import hashlib

import pytest
import torch
from torch.distributed import FileStore

from shoal.parallel.shard.grid import Grid
from shoal.parallel.shard.held import Gathered, Held, Piece, load, pieces_of
from tests.conftest import long
from tests.parallel.shard.crew import MODELS, TOKENS, adamw, alone, batch, counted, crew, sharded, train

ROUNDING = 2.0**-24 * 64


def gentle(model):
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.003, eps=0.01, fused=True)


def options_for(kind, name):
    if kind == "tensor" and name not in TOKENS:
        return {"patterns": "mlp"}
    # Dropout draws for a microbatch: one of them draws what a single process does.
    return {"microbatches": 1} if kind == "pipeline" and name in ("encoder", "normed") else {}


def run(kind, name, size, ways, steps, **options):
    """Losses and pieces of every process."""

    def act(grid):
        replica = sharded(grid, kind, name, **{**options_for(kind, name), **options})
        return train(replica, name, steps), copied(replica)

    return crew(size, act, ways)


def copied(replica):
    return {n: Piece(p.box, p.values.clone()) for n, p in pieces_of(replica.held, replica.optimizer).items()}


def whole(name, results, ways):
    """The model of the first replica."""
    model = MODELS[name]()
    load(Held.whole(model), Gathered(pieces for _, pieces in results[:ways]))
    return model.state_dict()


def off(found, expected):
    """The largest difference, in parts of the tensor's largest value."""
    worst = 0.0
    for name, value in expected.items():
        if not torch.equal(found[name], value):
            scale = value.abs().max().double()
            worst = max(worst, float((found[name].double() - value.double()).abs().max() / scale))
    return worst


def sha256(results):
    digest = hashlib.sha256()
    for losses, pieces in results:
        digest.update(repr((losses, sorted(pieces))).encode())
        for name in sorted(pieces):
            digest.update(pieces[name].values.contiguous().numpy().tobytes())
    return digest.hexdigest()


PAIRS = [
    ("fsdp", "gpt", 4, 4),
    ("pipeline", "gpt", 4, 4),
    ("tensor", "tied", 2, 2),
    ("pipeline", "normed", 2, 2),
    ("pipeline", "masked", 4, 4),
    ("fsdp", "frozen", 4, 2),
    ("fsdp", "loose", 2, 2),
    *long(
        ("pipeline", "tied", 2, 2),
        ("fsdp", "normed", 2, 2),
        ("tensor", "gpt", 4, 2),
        ("fsdp", "tied", 2, 2),
        ("tensor", "normed", 2, 2),
        ("pipeline", "mlp", 4, 2),
        ("tensor", "mlp", 4, 4),
        ("tensor", "encoder", 2, 2),
        ("fsdp", "encoder", 4, 4),
        ("pipeline", "encoder", 4, 4),
        ("tensor", "frozen", 4, 2),
        ("pipeline", "frozen", 4, 4),
        ("fsdp", "mlp", 4, 4),
        ("tensor", "gpt", 4, 4),
        ("pipeline", "gpt", 2, 2),
    ),
]


@pytest.mark.parametrize(("kind", "name", "size", "ways"), PAIRS)
def test_one_step_and_ten_agree_with_a_single_process(kind, name, size, ways):
    def act(grid):
        replica = sharded(grid, kind, name, **options_for(kind, name))
        first = train(replica, name, 1), copied(replica)
        return first, (train(replica, name, 9, first=1), copied(replica))

    after_one, after_ten = zip(*crew(size, act, ways), strict=True)
    for results, steps in ((after_one, 1), (after_ten, 10)):
        replica, losses = alone(name, steps)
        assert off(whole(name, results, ways), replica.model.state_dict()) < ROUNDING * steps
        for found, _ in results:
            assert found == pytest.approx(losses[-len(found) :], rel=ROUNDING * steps)


@pytest.mark.parametrize("kind", ["fsdp", "tensor", "pipeline"])
@pytest.mark.parametrize("size", long(2, 4))
def test_the_same_layout_gives_the_same_bits(kind, size):
    one, other = (run(kind, "gpt", size, 2, 5, optimizer=adamw, clip=0.5) for _ in range(2))
    assert sha256(one) == sha256(other)


@pytest.mark.parametrize("kind", [*long("tensor"), "pipeline"])
def test_the_number_of_replicas_changes_no_bit(kind):
    """Lanes are added on the same tree, by one replica or by two."""
    one, two = (run(kind, "gpt", size, 2, 3, optimizer=adamw) for size in (2, 4))
    assert sha256(one) == sha256(two[:2])


@pytest.mark.parametrize("kind", ["fsdp", *long("tensor", "pipeline")])
def test_replicas_have_the_same_bits(kind):
    results = run(kind, "gpt", 4, 2, 3)
    for mine, theirs in zip(results[:2], results[2:], strict=True):
        assert sha256([mine]) == sha256([theirs])


@pytest.mark.parametrize("kind", ["fsdp", *long("tensor"), "pipeline"])
@pytest.mark.parametrize("make", [gentle, *long(adamw)])
def test_adamw_with_clipping_and_a_loss_that_counts(kind, make):
    results = run(kind, "gpt", 2, 2, 10, optimizer=make, clip=0.3, loss=counted)
    replica, losses = alone("gpt", 10, optimizer=make, clip=0.3, loss=counted)
    assert results[0][0] == pytest.approx(losses, rel=ROUNDING * 10)
    if make is gentle:
        assert off(whole("gpt", results, 2), replica.model.state_dict()) < ROUNDING * 10


def test_what_every_block_is_handed_goes_through_cuts_that_are_chosen():
    results = run("pipeline", "masked", 2, 2, 1, cuts="auto")
    replica, _ = alone("masked", 1)
    assert off(whole("masked", results, 2), replica.model.state_dict()) < ROUNDING


def test_schedules_of_a_pipeline_differ_in_time_only():
    gpipe, other = (run("pipeline", "gpt", 2, 2, 3, schedule=schedule) for schedule in ("gpipe", "1f1b"))
    assert sha256(gpipe) == sha256(other)


def test_what_is_not_cut_has_the_same_bits_on_all_members():
    def act(grid):
        replica = sharded(grid, "tensor", "gpt")
        train(replica, "gpt", 3)
        return {n: p.local.detach().clone() for n, p in replica.held.parts.items() if p.box.is_whole}

    one, other = crew(2, act)
    assert "norm.weight" in one
    assert "blocks.0.qkv.weight" not in one
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("kind", ["fsdp", "tensor"])
def test_each_holds_its_share(kind):
    """Of parameters, and of the optimizer's two moments of each."""

    def act(grid):
        replica = sharded(grid, kind, "gpt", optimizer=adamw)
        train(replica, "gpt", 1)
        moments = [v for state in replica.optimizer.state.values() for v in state.values() if v.dim()]
        return sum(p.local.numel() for p in replica.held.parts.values()), sum(v.numel() for v in moments)

    full = sum(p.numel() for p in MODELS["gpt"]().parameters())
    found = crew(4 if kind == "fsdp" else 2, act)
    for held, moments in found:
        assert moments == 2 * held
        assert held < full / len(found) * 1.2


def test_a_member_without_a_lane_changes_nothing():
    """fsdp: all members run equally often, whatever there is to do."""

    def act(grid):
        replica = sharded(grid, "fsdp", "mlp")
        replica.begin()
        share = 0.0 if grid.seat else 1.0
        total = replica.forward_backward(0, 0, batch("mlp", 0, grid.seat), share=share)
        return float(replica.apply(0, total)), pieces_of(replica.held)

    results = crew(2, act)
    replica, _ = alone("mlp", 0)
    replica.begin()
    value = replica.apply(0, replica.forward_backward(0, 0, batch("mlp", 0, 0), share=1.0))
    assert off(whole("mlp", results, 2), replica.model.state_dict()) < ROUNDING
    assert results[1][0] == pytest.approx(float(value), rel=ROUNDING)


@pytest.mark.parametrize("kind", [*long("fsdp", "tensor"), "pipeline"])
def test_a_group_is_made_anew_and_goes_on(kind, tmp_path):
    """In the same processes, with what each of them held."""

    def act(grid):
        replica = sharded(grid, kind, "gpt", optimizer=adamw)
        train(replica, "gpt", 2)
        everybody = [None] * grid.ways
        torch.distributed.all_gather_object(everybody, copied(replica))
        undisturbed = train(replica, "gpt", 2, first=2)
        grid.close()
        again = Grid(FileStore(str(tmp_path / kind), 2), rank=grid.seat, size=2, ways=2)
        replica = sharded(again, kind, "gpt", optimizer=adamw)
        load(replica.held, Gathered(everybody), replica.optimizer)
        return undisturbed, train(replica, "gpt", 2, first=2)

    for undisturbed, again in crew(2, act):
        assert undisturbed == again


@pytest.mark.parametrize("kind", ["fsdp", "tensor", "pipeline"])
def test_the_model_can_be_looked_at(kind):
    def act(grid):
        replica = sharded(grid, kind, "encoder")
        replica.model.eval()
        return replica.cut.look(lambda model, batch: model(*batch.inputs), batch("encoder", 9, 9))

    replica, _ = alone("encoder", 0)
    replica.model.eval()
    expected = replica.model(*batch("encoder", 9, 9).inputs)
    *others, last = crew(2, act)
    torch.testing.assert_close(last, expected)
    assert kind == "pipeline" or all(torch.equal(other, last) for other in others)
