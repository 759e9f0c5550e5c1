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

from shoal.sharding.device_mesh import ShardMesh
from shoal.sharding.local_state import LocalState, PiecesInMemory, TensorPiece, load_local_state, owned_pieces
from tests.conftest import long_only
from tests.sharding.ranks import (
    MODELS,
    TOKEN_MODELS,
    adamw,
    batch,
    run_ranks,
    sharded,
    single_process,
    train,
    weighted_loss,
)

ROUNDING = 2.0**-24 * 64


def adamw_large_eps(model):
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.003, eps=0.01, fused=True)


def options_for(kind, name):
    if kind == "tensor" and name not in TOKEN_MODELS:
        return {"patterns": "mlp"}
    # Dropout draws for a microbatch: one of them draws what a single process does.
    return {"microbatches": 1} if kind == "pipeline" and name in ("encoder", "batch_normed") else {}


def train_ranks(kind, name, size, ways, steps, **options):
    """Losses and pieces of every process."""

    def act(mesh):
        replica = sharded(mesh, kind, name, **{**options_for(kind, name), **options})
        return train(replica, name, steps), copy_pieces(replica)

    return run_ranks(size, act, ways)


def copy_pieces(replica):
    return {
        n: TensorPiece(p.tensor_slice, p.values.clone())
        for n, p in owned_pieces(replica.local_state, replica.optimizer).items()
    }


def gathered_state(name, results, ways):
    """The model of the first replica."""
    model = MODELS[name]()
    load_local_state(LocalState.unsharded(model), PiecesInMemory(pieces for _, pieces in results[:ways]))
    return model.state_dict()


def relative_error(found, expected):
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
    ("pipeline", "batch_normed", 2, 2),
    ("pipeline", "masked", 4, 4),
    ("fsdp", "frozen", 4, 2),
    ("fsdp", "loose", 2, 2),
    *long_only(
        ("pipeline", "tied", 2, 2),
        ("fsdp", "batch_normed", 2, 2),
        ("tensor", "gpt", 4, 2),
        ("fsdp", "tied", 2, 2),
        ("tensor", "batch_normed", 2, 2),
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
    def act(mesh):
        replica = sharded(mesh, kind, name, **options_for(kind, name))
        first = train(replica, name, 1), copy_pieces(replica)
        return first, (train(replica, name, 9, first=1), copy_pieces(replica))

    after_one, after_ten = zip(*run_ranks(size, act, ways), strict=True)
    for results, steps in ((after_one, 1), (after_ten, 10)):
        replica, losses = single_process(name, steps)
        assert relative_error(gathered_state(name, results, ways), replica.model.state_dict()) < ROUNDING * steps
        for found, _ in results:
            assert found == pytest.approx(losses[-len(found) :], rel=ROUNDING * steps)


@pytest.mark.parametrize("kind", ["fsdp", "tensor", "pipeline"])
@pytest.mark.parametrize("size", long_only(2, 4))
def test_the_same_layout_gives_the_same_bits(kind, size):
    one, other = (train_ranks(kind, "gpt", size, 2, 5, optimizer=adamw, clip=0.5) for _ in range(2))
    assert sha256(one) == sha256(other)


@pytest.mark.parametrize("kind", [*long_only("tensor"), "pipeline"])
def test_the_number_of_replicas_changes_no_bit(kind):
    """Lanes are added on the same tree, by one replica or by two."""
    one, two = (train_ranks(kind, "gpt", size, 2, 3, optimizer=adamw) for size in (2, 4))
    assert sha256(one) == sha256(two[:2])


@pytest.mark.parametrize("kind", ["fsdp", *long_only("tensor", "pipeline")])
def test_replicas_have_the_same_bits(kind):
    results = train_ranks(kind, "gpt", 4, 2, 3)
    for mine, theirs in zip(results[:2], results[2:], strict=True):
        assert sha256([mine]) == sha256([theirs])


@pytest.mark.parametrize("kind", ["fsdp", *long_only("tensor"), "pipeline"])
@pytest.mark.parametrize("make", [adamw_large_eps, *long_only(adamw)])
def test_adamw_with_clipping_and_a_loss_that_counts(kind, make):
    results = train_ranks(kind, "gpt", 2, 2, 10, optimizer=make, clip=0.3, loss=weighted_loss)
    replica, losses = single_process("gpt", 10, optimizer=make, clip=0.3, loss=weighted_loss)
    assert results[0][0] == pytest.approx(losses, rel=ROUNDING * 10)
    if make is adamw_large_eps:
        assert relative_error(gathered_state("gpt", results, 2), replica.model.state_dict()) < ROUNDING * 10


def test_arguments_of_every_block_pass_automatic_split_points():
    results = train_ranks("pipeline", "masked", 2, 2, 1, cuts="auto")
    replica, _ = single_process("masked", 1)
    assert relative_error(gathered_state("masked", results, 2), replica.model.state_dict()) < ROUNDING


def test_schedules_of_a_pipeline_differ_in_time_only():
    gpipe, other = (train_ranks("pipeline", "gpt", 2, 2, 3, schedule=schedule) for schedule in ("gpipe", "1f1b"))
    assert sha256(gpipe) == sha256(other)


def test_unsharded_tensors_have_the_same_bits_on_all_ranks():
    def act(mesh):
        replica = sharded(mesh, "tensor", "gpt")
        train(replica, "gpt", 3)
        return {
            n: p.local_tensor.detach().clone() for n, p in replica.local_state.shards.items() if p.tensor_slice.is_full
        }

    one, other = run_ranks(2, act)
    assert "norm.weight" in one
    assert "blocks.0.qkv.weight" not in one
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("kind", ["fsdp", "tensor"])
def test_each_holds_its_share(kind):
    """Of parameters, and of the optimizer's two moments of each."""

    def act(mesh):
        replica = sharded(mesh, kind, "gpt", optimizer=adamw)
        train(replica, "gpt", 1)
        moments = [v for state in replica.optimizer.state.values() for v in state.values() if v.dim()]
        return sum(p.local_tensor.numel() for p in replica.local_state.shards.values()), sum(v.numel() for v in moments)

    full = sum(p.numel() for p in MODELS["gpt"]().parameters())
    found = run_ranks(4 if kind == "fsdp" else 2, act)
    for held, moments in found:
        assert moments == 2 * held
        assert held < full / len(found) * 1.2


def test_a_member_without_a_lane_changes_nothing():
    """fsdp: all members run equally often, whatever there is to do."""

    def act(mesh):
        replica = sharded(mesh, "fsdp", "mlp")
        replica.begin_step()
        share = 0.0 if mesh.shard_rank else 1.0
        total = replica.forward_backward(0, 0, batch("mlp", 0, mesh.shard_rank), share=share)
        return float(replica.apply(0, total)), owned_pieces(replica.local_state)

    results = run_ranks(2, act)
    replica, _ = single_process("mlp", 0)
    replica.begin_step()
    value = replica.apply(0, replica.forward_backward(0, 0, batch("mlp", 0, 0), share=1.0))
    assert relative_error(gathered_state("mlp", results, 2), replica.model.state_dict()) < ROUNDING
    assert results[1][0] == pytest.approx(float(value), rel=ROUNDING)


@pytest.mark.parametrize("kind", [*long_only("fsdp", "tensor"), "pipeline"])
def test_a_group_is_made_anew_and_goes_on(kind, tmp_path):
    """In the same processes, with what each of them held."""

    def act(mesh):
        replica = sharded(mesh, kind, "gpt", optimizer=adamw)
        train(replica, "gpt", 2)
        everybody = [None] * mesh.replica_size
        torch.distributed.all_gather_object(everybody, copy_pieces(replica))
        undisturbed = train(replica, "gpt", 2, first=2)
        mesh.close()
        again = ShardMesh(FileStore(str(tmp_path / kind), 2), rank=mesh.shard_rank, world_size=2, replica_size=2)
        replica = sharded(again, kind, "gpt", optimizer=adamw)
        load_local_state(replica.local_state, PiecesInMemory(everybody), replica.optimizer)
        return undisturbed, train(replica, "gpt", 2, first=2)

    for undisturbed, again in run_ranks(2, act):
        assert undisturbed == again


@pytest.mark.parametrize("kind", ["fsdp", "tensor", "pipeline"])
def test_the_model_can_be_looked_at(kind):
    def act(mesh):
        replica = sharded(mesh, kind, "encoder")
        replica.model.eval()
        return replica.sharded_model.forward(lambda model, batch: model(*batch.inputs), batch("encoder", 9, 9))

    replica, _ = single_process("encoder", 0)
    replica.model.eval()
    expected = replica.model(*batch("encoder", 9, 9).inputs)
    *others, last = run_ranks(2, act)
    torch.testing.assert_close(last, expected)
    assert kind == "pipeline" or all(torch.equal(other, last) for other in others)
