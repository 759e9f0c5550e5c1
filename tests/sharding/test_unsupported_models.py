"""What cannot be cut is told, with what to do instead."""

import pytest
import torch
from torch import nn

from shoal.errors import ShoalError
from shoal.sharding.build_model import build_sharded_model
from shoal.sharding.replica import ShardedReplica
from shoal.sharding.tensor_parallel import select_modules
from shoal.spec.sharding import FsdpConfig, PipelineParallelConfig, TensorParallelConfig
from tests.sharding.ranks import MODELS, batch, loss, run_ranks, sgd, train


def test_ready_patterns():
    found = select_modules(MODELS["gpt"](), "transformer", 2)
    assert found["tokens"] == found["head"] == found["blocks.0.qkv"] == "gathered"
    assert (found["blocks.1.feed.0"], found["blocks.1.feed.2"]) == ("columns", "rows")
    assert not [name for name in found if "norm" in name]
    assert select_modules(MODELS["tied"](), "transformer", 2)["head"] == "sliced"
    assert set(select_modules(MODELS["gpt"](), "mlp", 2)) == set(found) - {"tokens", "places"}
    encoder = select_modules(MODELS["encoder"](), "transformer", 2)
    assert encoder["layers.0.self_attn"] == encoder["layers.0.linear1"] == "gathered"  # dropout stands between
    assert "layers.0.self_attn.out_proj" not in encoder
    assert list(select_modules(MODELS["mlp"](), "mlp", 2).values()) == ["columns", "rows"] * 2
    assert (
        list(select_modules(MODELS["mlp"](), "mlp", 5).values()) == ["gathered"] * 4
    )  # 32 and 24 are no multiples of 5


def test_patterns_of_ones_own():
    found = select_modules(
        MODELS["gpt"](), {"blocks.*.feed.0": "columns", "blocks.*.feed.2": "rows", "blocks.0.*": "x"}, 2
    )
    assert (found["blocks.0.feed.0"], found["blocks.2.feed.2"], found["blocks.0.qkv"]) == ("columns", "rows", "x")
    with pytest.raises(ShoalError, match="matches no module") as caught:
        select_modules(MODELS["gpt"](), {"block.*": "rows"}, 2)
    assert caught.value.code == "SH405"
    with pytest.raises(ShoalError, match="nothing that `mlp` would cut"):
        select_modules(nn.Conv2d(1, 1, 1), "mlp", 2)


def refused(shard, make):
    """The error of each of two processes."""

    def act(mesh):
        with pytest.raises(ShoalError) as caught:
            build_sharded_model(shard, mesh, make, loss=loss, example=batch("gpt", 0, 0))
        return caught.value.code, str(caught.value)

    return run_ranks(2, act)


@pytest.mark.parametrize(
    ("name", "patterns", "code", "words"),
    [
        ("gpt", {"norm": "rows"}, "SH206", "LayerNorm"),
        ("tied", {"tokens": "gathered", "head": "gathered"}, "SH107", "one parameter"),
        ("encoder", {"layers.0.self_attn": "rows"}, "SH206", "MultiheadAttention"),
    ],
)
def test_what_tensors_cannot_do(name, patterns, code, words):
    for found, text in refused(TensorParallelConfig(kind="tensor", patterns=patterns), MODELS[name]):
        assert found == code
        assert words in text


class SkipConnection(nn.Module):
    """The first layer's output goes around the second."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(12, 12), nn.Linear(12, 34)
        self.three = nn.Linear(12, 34)

    def forward(self, x):
        x = self.one(x)
        return self.two(torch.relu(x)) + self.three(x)


def twice(model, batch):
    return loss(model, batch) + loss(model, batch)


@pytest.mark.parametrize(
    ("make", "loss", "words"), [(SkipConnection, loss, "computed before"), (MODELS["mlp"], twice, "once")]
)
def test_what_pipelines_cannot_do(make, loss, words):
    def act(mesh):
        shard = PipelineParallelConfig(kind="pipeline", cuts=["two" if make is SkipConnection else "2"], microbatches=1)
        sharded_model, _ = build_sharded_model(shard, mesh, make, loss=loss, example=batch("mlp", 0, 0))
        if mesh.shard_rank == 0:
            return sharded_model.forward(loss, batch("mlp", 0, 0))
        with pytest.raises(ShoalError) as caught:
            sharded_model.forward(loss, batch("mlp", 0, 0))
        return str(caught.value)

    assert words in run_ranks(2, act)[1]


def activated():
    return nn.Sequential(nn.Linear(12, 32), nn.PReLU(), nn.Linear(32, 34))


def begun_at_zero():
    """At first, nothing goes back through the last layer."""
    model = activated()
    nn.init.zeros_(model[2].weight)
    return model


@pytest.mark.parametrize(("make", "steps"), [(activated, 0), (begun_at_zero, 2)])
def test_what_may_not_stand_between_columns_and_rows(make, steps):
    """Each member would have its own part of the gradient, and go on with other values than the rest."""

    def act(mesh):
        shard = TensorParallelConfig(kind="tensor", patterns={"0": "columns", "2": "rows"})
        sharded_model, local_state = build_sharded_model(shard, mesh, make, loss=loss, example=batch("mlp", 0, 0))
        replica = ShardedReplica(sharded_model, local_state, sgd(local_state.param_module), loss, seed=0)
        if steps:
            replica.probe(batch("mlp", 0, 0))
        with pytest.raises(ShoalError) as caught:
            train(replica, "mlp", steps) if steps else replica.probe(batch("mlp", 0, 0))
        return caught.value.code, caught.value.message

    for code, message in run_ranks(2, act):
        assert code == "SH107"
        assert "'1.weight'" in message


def mixed():
    return nn.Sequential(nn.Linear(12, 34), nn.LayerNorm(34, dtype=torch.bfloat16))


def test_fsdp_sends_gradients_of_one_kind():
    for code, text in refused(FsdpConfig(kind="fsdp"), mixed):
        assert code == "SH110"
        assert "bfloat16 and float32" in text


def decayed(model, batch):
    return loss(model, batch) + 0.01 * model[0].weight.square().sum()


def test_fsdp_has_parameters_whole_only_within_the_model():
    def act(mesh):
        sharded_model, _ = build_sharded_model(
            FsdpConfig(kind="fsdp"), mesh, MODELS["mlp"], loss=decayed, example=batch("mlp", 0, 0)
        )
        with pytest.raises(ShoalError) as caught:
            sharded_model.forward_backward(decayed, batch("mlp", 0, 0), 1.0)
        return caught.value.code, str(caught.value)

    for code, text in run_ranks(2, act):
        assert code == "SH107"
        assert "in the loss" in text


class LateMaskUse(nn.Module):
    """What is made before the cut is not an argument there, and a later block uses it in torch's attention, which does
    not mind a mask without memory."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(34, 32)
        self.blocks = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
        self.head = nn.Linear(32, 34)

    def forward(self, x):
        h, mask = self.tokens(x), torch.full((x.shape[1], x.shape[1]), -1e4).triu(1)
        for i, block in enumerate(self.blocks):
            h = block(h)
            if i == 2:
                heads = h.unflatten(-1, (4, 8)).transpose(1, 2)
                heads = nn.functional.scaled_dot_product_attention(heads, heads, heads, attn_mask=mask)
                h = heads.transpose(1, 2).flatten(-2)
        return self.head(h).transpose(1, 2)


def test_a_tensor_made_before_a_split_point_is_not_read_after_it():
    def act(mesh):
        shard = PipelineParallelConfig(kind="pipeline", cuts=["blocks.1"], microbatches=1)
        sharded_model, _ = build_sharded_model(shard, mesh, LateMaskUse, loss=loss, example=batch("gpt", 0, 0))
        if mesh.shard_rank == 0:
            return sharded_model.forward(loss, batch("gpt", 0, 0))
        with pytest.raises(ShoalError) as caught:
            sharded_model.forward(loss, batch("gpt", 0, 0))
        return caught.value.code, str(caught.value)

    (code, text) = run_ranks(2, act)[1]
    assert code == "SH107"
    assert "after a cut the model uses a value that it computed before" in text
