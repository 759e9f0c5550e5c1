"""Heads of attention are found by what a model computes, and cut in a form that its code accepts."""

import copy

import pytest
import torch
from torch import nn

from shoal.compression.dependency import find_groups
from shoal.compression.importance import by_magnitude, by_taylor, by_zeros, cut_channels, cut_least
from shoal.compression.shape import apply_steps, count_parameters, low_rank_step
from shoal.errors import ShoalError
from shoal.spec.compression.steps import CutStep, Kept
from tests.compression.networks import Apart, Encoder, Recurrent, Transformer

TOKENS = torch.randint(0, 20, (2, 12), generator=torch.Generator().manual_seed(0))


def groups_of(make):
    torch.manual_seed(0)
    model = make().eval()
    return model, find_groups(model, (TOKENS,))


def members(group):
    return {(one.layer, one.is_input) for one in group.members}


def test_own_attention_keeps_its_width():
    """Its code reshapes to the old width: zeros fill it."""
    _, groups = groups_of(Transformer)
    kinds = {one.name: (one.kind, one.channels) for one in groups.found}
    assert kinds == {
        f"blocks.{i}.{name}": kind for i in (0, 1) for name, kind in (("qkv", ("filled", 2)), ("up", ("channels", 64)))
    }
    assert members(groups.found[0]) == {("blocks.0.qkv", False), ("blocks.0.out", True)}
    assert groups.found[0].members[0].columns[1] == tuple(16 * part + 8 + i for part in range(3) for i in range(8))
    assert set(groups.refused) == {"head", *(f"blocks.{i}.{n}" for i in range(2) for n in ("out", "down"))}


def test_heads_of_separate_layers_are_really_cut():
    model, groups = groups_of(Apart)
    assert [(one.kind, one.channels) for one in groups.found] == [("heads", 4)]
    assert members(groups.found[0]) == {("q", False), ("k", False), ("v", False), ("out", True)}
    small = apply_steps(model, [cut_least(groups.found, by_magnitude(model, groups.found), remove=0.5)])
    assert {small.get_submodule(name).weight.shape for name in "qkv"} == {(8, 16)}


@pytest.mark.parametrize("make", [Transformer, Apart, Encoder])
def test_a_model_without_a_head_is_the_one_that_ignores_it(make):
    model, groups = groups_of(make)
    heads = [one for one in groups.found if one.kind != "channels"]
    kept = [[c for c in range(one.channels) if c != 1] for one in heads]
    small = apply_steps(copy.deepcopy(model), [cut_channels(heads, kept)])
    assert count_parameters(small) < count_parameters(model)
    with torch.no_grad():
        for group in heads:
            for member in group.members:
                if member.is_input:
                    model.get_submodule(member.layer).weight[:, list(member.columns[1])] = 0
    assert torch.allclose(small(TOKENS), model(TOKENS), atol=1e-5)
    again = apply_steps(make(), [cut_channels(heads, kept)]).eval()
    again.load_state_dict(small.state_dict())
    assert torch.equal(again(TOKENS), small(TOKENS))


@pytest.mark.parametrize("score", ["taylor", "zeros"])
def test_scores_over_lanes_count_heads_too(score):
    model, groups = groups_of(Encoder)
    steps = [[TOKENS[:1], TOKENS[1:]]]
    if score == "taylor":
        scores = by_taylor(model, groups.found, steps, lambda batch: model(batch).square().mean())
    else:
        scores = by_zeros(model, groups.found, steps, model)
    assert [len(one) for one in scores] == [one.channels for one in groups.found]
    small = apply_steps(copy.deepcopy(model), [cut_least(groups.found, scores, remove=0.5)])
    assert small(TOKENS).shape == model(TOKENS).shape
    assert small.encoder.layers[0].self_attn.num_heads == 2
    small.train()(TOKENS).sum().backward()


@pytest.mark.parametrize("make", [Transformer, Encoder])
def test_a_transformer_without_a_head_has_products_that_its_code_accepts(make):
    """torch's encoder reads the weights of its layers; a layer that fills its width up with zeros stays as it is."""
    model, groups = groups_of(make)
    heads = [one for one in groups.found if one.kind != "channels"]
    wide = apply_steps(copy.deepcopy(model), [cut_channels(heads[:1], [[0]])])
    step, refused = low_rank_step(wide, 0.25)
    assert {name.rpartition(".")[2] for name in step.layers} >= ({"up", "down"} if make is Transformer else {"linear1"})
    assert any("WideLinear" in why or "NonDynamicallyQuantizableLinear" in why for why in refused.values())
    small = apply_steps(wide, [step]).eval()
    with torch.no_grad():
        fused = small(TOKENS)
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            plain = small(TOKENS)
        finally:
            torch.backends.mha.set_fastpath_enabled(True)
    assert fused.shape == (2, 12, 20)
    assert torch.allclose(fused, plain, atol=1e-5)
    small.train()(TOKENS).sum().backward()


def test_fewer_heads_give_weights_and_take_masks():
    torch.manual_seed(0)
    whole = nn.MultiheadAttention(8, 2).eval()
    both = apply_steps(nn.Sequential(copy.deepcopy(whole)), [CutStep(layers={"0": Kept(heads="0-1")})])[0].eval()
    x = torch.rand(5, 3, 8)
    padding = torch.tensor([[False] * 5, [False] * 4 + [True], [False] * 3 + [True] * 2])
    causal = nn.Transformer.generate_square_subsequent_mask(5)
    for masks in ({}, {"key_padding_mask": padding}, {"attn_mask": causal}):
        for one, other in zip(whole(x, x, x, **masks), both(x, x, x, **masks), strict=True):
            assert torch.allclose(one, other, atol=1e-6)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("batch_first", [True, False])
def test_units_of_a_recurrent_layer_are_cut_with_what_reads_them(kind, batch_first):
    """What is left gives what the whole model gives if nothing reads the removed units."""
    model, groups = groups_of(lambda: Recurrent(kind, batch_first=batch_first))
    assert {one.name: one.kind for one in groups.found} == {"head.0": "channels", "recurrent": "recurrent"}
    group = next(one for one in groups.found if one.kind == "recurrent")
    assert group.channels == 16
    cut = cut_channels([group], [[0, 3, 4, 9, 15]])
    small = apply_steps(copy.deepcopy(model), [cut])
    assert (small.recurrent.hidden_size, small.head[0].in_features) == (5, 5)
    gone = [i for i in range(16) if i not in (0, 3, 4, 9, 15)]
    with torch.no_grad():
        model.recurrent.weight_hh_l0[:, gone] = 0
        model.head[0].weight[:, gone] = 0
    assert torch.allclose(small(TOKENS), model(TOKENS), atol=1e-6)
    again = apply_steps(Recurrent(kind, batch_first=batch_first), [cut]).eval()
    again.load_state_dict(small.state_dict())
    assert torch.equal(again(TOKENS), small(TOKENS))
    small.train()(TOKENS).sum().backward()


@pytest.mark.parametrize("score", [by_magnitude, by_taylor, by_zeros])
def test_units_have_scores(score):
    model, groups = groups_of(Recurrent)
    more = {
        by_magnitude: (),
        by_taylor: ([[TOKENS, None]], lambda batch: model(batch).square().mean()),
        by_zeros: ([[TOKENS, None]], model),
    }
    scores = score(model, groups.found, *more[score])
    assert [len(one) for one in scores] == [one.channels for one in groups.found]
    cut = cut_least(groups.found, scores, remove=0.5)
    assert apply_steps(copy.deepcopy(model), [cut]).recurrent.hidden_size == 8


@pytest.mark.parametrize("last", [nn.LayerNorm(4), nn.BatchNorm1d(4), nn.LogSoftmax(1), nn.Identity()])
def test_the_output_keeps_its_width(last):
    """Also behind a norm, which has no outputs of its own."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 4), last), torch.rand(2, 8)
    groups = find_groups(model, (x,))
    assert [one.name for one in groups.found] == ["0"]
    assert "2" in groups.refused
    small = apply_steps(copy.deepcopy(model), [cut_least(groups.found, by_magnitude(model, groups.found), remove=0.5)])
    assert small(x).shape == (2, 4)


@pytest.mark.parametrize("more", [{"num_layers": 2}, {"bidirectional": True}, {"proj_size": 4}])
def test_a_recurrent_layer_that_cannot_be_cut_is_named(more):
    _, groups = groups_of(lambda: Recurrent(**more))
    assert "several layers or directions, or with a projection" in groups.refused["recurrent"]
    assert [one.name for one in groups.found] == ["head.0"]
    with pytest.raises(ShoalError, match="one recurrent layer") as refused:
        apply_steps(Recurrent(**more), [CutStep(layers={"recurrent": Kept(out="0-3")})])
    assert refused.value.code == "SH660"


@pytest.mark.parametrize(
    ("kept", "why"),
    [(Kept(heads="0,4"), "has no 4"), (Kept(out="0", wide="out"), "cannot keep its width")],
)
def test_heads_that_do_not_fit(kept, why):
    with pytest.raises(ShoalError, match=why) as refused:
        apply_steps(nn.Sequential(nn.MultiheadAttention(8, 2)), [CutStep(layers={"0": kept})])
    assert refused.value.code == "SH660"


@pytest.mark.long
@pytest.mark.parametrize("kind", ["Bert", "Llama"])
def test_models_of_hugging_face(kind):
    hub = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = getattr(hub, f"{kind}Config")(**sizes, intermediate_size=64)
    name = "BertForSequenceClassification" if kind == "Bert" else "LlamaForCausalLM"
    model = Logits(getattr(hub, name)(config)).eval()
    groups = find_groups(model, (TOKENS,))
    assert [one.kind for one in groups.found if "self" in one.name] == ["heads"] * 2
    assert sum(one.kind == "channels" for one in groups.found) >= 2
    small = apply_steps(copy.deepcopy(model), [cut_least(groups.found, by_magnitude(model, groups.found), remove=0.5)])
    assert small(TOKENS).shape == model(TOKENS).shape
    assert count_parameters(small) < 0.8 * count_parameters(model)


class Logits(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return self.model(x).logits
