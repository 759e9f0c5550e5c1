from __future__ import annotations

import hashlib
import itertools
import struct
from collections import OrderedDict

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from shoal.checkpoint.sha256 import state_sha256, weights_sha256
from shoal.checkpoint.state_tree import flatten, subtree, tensor_names, unflatten
from shoal.errors import CheckpointError

from .states import bit_equal, states


@given(states)
@settings(max_examples=200, deadline=None)
def test_a_state_comes_back_exactly(state):
    tensors, skeleton = flatten(state)
    assert bit_equal(unflatten(tensors, skeleton), state)
    assert sorted(tensor_names(skeleton)) == sorted(tensors)
    assert state_sha256(unflatten(tensors, skeleton)) == state_sha256(state)


def test_names_of_tensors_are_paths_and_never_collide():
    one = torch.zeros(1)
    tensors, _ = flatten({"a/b": one, "a": {"b": one, 0: one, "0": one, "~i0": one}, "": [one, (one,)]})
    assert list(tensors) == ["/a~1b", "/a/b", "/a/~i0", "/a/0", "/a/~0i0", "//0", "//1/0"]


@pytest.mark.parametrize(
    ("state", "where", "what"),
    [
        ({"a": [1, b"x"]}, "state/a/1", "builtins.bytes"),
        ({"a": {"b": {1, 2}}}, "state/a/b", "builtins.set"),
        ({"a": np.float64(1)}, "state/a", "numpy.float64"),
        ({"a": np.zeros(2)}, "state/a", "numpy.ndarray"),
        ({"a": {True: 1}}, "state/a", "key of type bool"),
        ({"a": {(1, 2): 1}}, "state/a", "key of type tuple"),
        ({"a": torch.Size([1])}, "state/a", "torch.Size"),
        ({"a": torch.zeros(2).to_sparse()}, "state/a", "sparse"),
        ({"a": torch.zeros(2, device="meta")}, "state/a", "meta"),
        ({"a": torch.zeros(2, dtype=torch.complex128)}, "state/a", "complex128"),
        ({"a": lambda: 1}, "state/a", "function"),
        ({"a": 1 << 9000}, "state/a", "bits"),
    ],
)
def test_what_cannot_be_saved_is_named(state, where, what):
    with pytest.raises(CheckpointError) as caught:
        flatten(state)
    assert (caught.value.code, caught.value.where) == ("SH506", where)
    assert what in caught.value.message


def test_a_state_that_holds_itself_is_an_error_and_not_a_crash():
    state: dict[str, object] = {}
    state["again"] = state
    with pytest.raises(CheckpointError, match="nested too deeply"):
        flatten(state)


@pytest.mark.parametrize(
    "skeleton",
    [
        {"tensor": "nobody"}, {"tensor": ["x"]}, {"tensor": None}, {"pickle": "x"}, {}, {"dict": 3},
        {"dict": [[1]]},
        {"dict": [[[], 1]]}, {"tuple": 5}, {"float": "one"}, {"float": []}, {"float": 10**400},
        {"dict": [], "tuple": []},
    ],
)  # fmt: skip
def test_a_hostile_skeleton_is_damage(skeleton):
    with pytest.raises(CheckpointError) as caught:
        unflatten({}, [skeleton])
    assert caught.value.code == "SH502"


def test_a_very_deep_skeleton_is_damage():
    skeleton: object = 1
    for _ in range(5000):
        skeleton = [skeleton]
    with pytest.raises(CheckpointError, match="nested too deeply"):
        unflatten({}, skeleton)


def test_a_section_can_be_taken_alone():
    _, skeleton = flatten({"model": {"w": torch.zeros(2)}, "step": 3})
    part = subtree(skeleton, "model")
    assert tensor_names(part) == ["/model/w"]
    assert subtree(skeleton, "nothing") is None
    assert subtree([1], "model") is None


# ---- digests ----


def test_the_digest_of_known_weights():
    """A change of this number would break every receipt that was ever written."""
    weights = {"b": torch.tensor([1.0, 2.0]), "a": torch.tensor([[1, 2]], dtype=torch.int16)}
    assert weights_sha256(weights) == weights_sha256(dict(sorted(weights.items())))
    layout = b'["a", "torch.int16", [1, 2]]%b["b", "torch.float32", [2]]%b'
    expected = layout % (struct.pack("<hh", 1, 2), struct.pack("<ff", 1.0, 2.0))
    assert weights_sha256(weights) == hashlib.sha256(expected).hexdigest()


def test_every_difference_changes_the_digest():
    base = torch.tensor([0.0, 1.0])
    variants = [
        {"a": base}, {"b": base}, {"a": base.double()}, {"a": base.reshape(2, 1)},
        {"a": torch.tensor([-0.0, 1.0])},
        {"a": base, "b": torch.empty(0)}, {}, {"a": base[:1], "b": base[1:]}, {"a": base.view(torch.int32)},
    ]  # fmt: skip
    assert len({weights_sha256(variant) for variant in variants}) == len(variants)


def test_layout_and_order_do_not_change_the_digest():
    matrix = torch.arange(6.0).reshape(2, 3)
    assert weights_sha256({"a": matrix.t()}) == weights_sha256({"a": matrix.t().contiguous()})
    assert state_sha256({"a": 1, 2: matrix}) == state_sha256(OrderedDict([(2, matrix.clone()), ("a", 1)]))


def test_states_with_other_types_have_other_digests():
    values = [
        1,
        1.0,
        True,
        "1",
        None,
        [1],
        (1,),
        {1: 1},
        {"1": 1},
        float("inf"),
        "inf",
        {},
        [],
        (),
        torch.ones(1),
    ]
    for a, b in itertools.combinations(values, 2):
        assert state_sha256(a) != state_sha256(b), (a, b)
