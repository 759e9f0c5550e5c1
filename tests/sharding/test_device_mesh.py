"""Members of a mesh that wait for each other."""

import threading
import time

import pytest
import torch
from torch import distributed

from shoal.net.errors import LinkError
from tests.sharding.ranks import run_ranks

LARGE = 50_000_000


def test_a_message_comes_as_it_was_sent():
    def act(mesh):
        if mesh.shard_rank:
            distributed.send(torch.arange(1000), 0)
            return True
        found = torch.zeros(1000, dtype=torch.int64)
        mesh.receive(found, 1)
        return torch.equal(found, torch.arange(1000))

    assert run_ranks(2, act) == [True, True]


def test_who_waits_for_the_rest_of_a_message_is_woken(tmp_path):
    """Its sender is gone, and gloo says nothing."""
    begun = tmp_path / "begun"

    def act(mesh):
        values = torch.zeros(LARGE) if mesh.shard_rank == 0 else torch.ones(LARGE)
        if mesh.shard_rank:
            sending = distributed.isend(values, 0)
            until(begun.exists)
            return sending.is_completed()  # and its process ends
        threading.Thread(target=lambda: (until(lambda: values[0] > 0), begun.touch()), daemon=True).start()
        mesh.is_aborted = begun.exists
        with pytest.raises(LinkError):
            mesh.receive(values, 1)
        return True

    assert run_ranks(2, act) == [True, False]


def until(there):
    while not there():
        time.sleep(0.001)
