"""What clients without torch do again: the layout of a stretch, and the bytes of a state."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.checkpoint import state_format
from shoal.fleet.roster import Peer, Roster
from shoal.lanes.flat_layout import FlatLayout
from shoal.net.errors import LinkError
from shoal.server.client_membership import ClientMembership
from shoal.server.numpy_format import pack, unpack
from shoal.server.numpy_layout import CODES, NumpyLayout
from shoal.server.snapshot import ServerSnapshot, snapshot_from_chunks
from tests.fleet.test_roster import FakeConnections

shapes = st.lists(st.integers(0, 90), max_size=3).map(tuple)
likes = st.dictionaries(st.text(min_size=1, max_size=5), st.tuples(st.sampled_from(sorted(CODES)), shapes), min_size=1)


@settings(deadline=None, max_examples=60)
@given(like=likes)
def test_the_layout_of_servers(like):
    flat = NumpyLayout(like)
    layout = FlatLayout.from_description(flat.describe())
    assert (flat.size_bytes, flat.tail, flat.cuts) == (layout.size_bytes, layout.tail, layout.chunk_offsets)
    assert [place.start for place in flat.slots] == [place.start for place in layout.grads]
    for a, b in pairwise(flat.cuts):
        assert list(flat.slices(a, b)) == layout.tensor_ranges(a, b)


@settings(deadline=None, max_examples=30)
@given(like=likes, pieces=st.integers(1, 5), seed=st.integers(0, 9))
def test_what_is_held_comes_back(like, pieces, seed):
    chance, flat = np.random.default_rng(seed), NumpyLayout(like)
    values = {p.name: np.asarray(chance.normal(size=p.shape)).astype(p.dtype) for p in flat.slots}
    state = {p.name: {"exp_avg": chance.normal(size=values[p.name].size), "step": np.float32(3)} for p in flat.slots}
    state = {name: {"exp_avg": slots["exp_avg"], "step": np.array(3.0, np.float32)} for name, slots in state.items()}
    held = ServerSnapshot(values, state, [4, 7])
    ends = sorted({0, len(flat.cuts) - 1, *chance.integers(0, len(flat.cuts), pieces).tolist()})
    found = {(a, b): held.chunk_state(flat, a, b, lanes=2) for a, b in pairwise(ends)}
    back = snapshot_from_chunks(flat, found, synchronous=False)
    assert back.clocks == [4, 7]
    for name, value in values.items():
        np.testing.assert_array_equal(back.values[name], value)
        if value.size:
            np.testing.assert_array_equal(back.state[name]["exp_avg"], state[name]["exp_avg"])
            assert back.state[name]["step"] == 3


def test_states_are_packed_as_live_states_are():
    plain = {"a": [1, None, 2.5, "x", {"b": True}]}
    ours = plain | {"n": np.arange(6, dtype=np.int64).reshape(2, 3), "s": np.array(1.5)}
    theirs = plain | {"n": torch.arange(6).reshape(2, 3), "s": torch.tensor(1.5, dtype=torch.float64)}
    assert pack(ours) == state_format.pack_state(theirs)
    back = unpack(state_format.pack_state(theirs))
    np.testing.assert_array_equal(back["n"], ours["n"])
    assert back["s"].shape == ()
    assert back["a"] == plain["a"]


@pytest.mark.parametrize("spoilt", [b"", b"noise" * 20, pack({"a": np.zeros(3)})[:-1], pack({"a": np.zeros(3)}) + b"x"])
def test_malformed_bytes_are_no_state(spoilt):
    with pytest.raises(LinkError):
        unpack(spoilt)


def test_who_is_waited_for():
    clients = ClientMembership(3, Roster(FakeConnections()))
    assert (clients.next_view().leave, clients.next_view()) == ([], None)
    assert not clients.add(0, Peer(10))
    assert not clients.add(1, Peer(11))
    assert sorted(clients.next_view().carries) == clients.present == [0, 1]
    assert clients.why_refused(1), "it is here already"
    clients.remove(1)
    assert clients.next_view().leave == [1]
    assert clients.add(1, Peer(12))
    assert clients.next_view().leave == [1]  # not yet beside the others
    assert clients.present == [0]
    clients.mark_entered(1)
    assert clients.next_view().leave == []
    assert clients.why_refused(3)
    assert clients.why_refused("1")
    assert not clients.why_refused(2)
