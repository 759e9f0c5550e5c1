"""A run over nodes of Ray that share nothing but a network. Run by `make test-ray`; needs root."""

import importlib.util
import os

import pytest

from tests.conftest import MLP
from tests.fleet.ray_hosts import ENVIRONMENT, ray_on_hosts
from tests.jobs.fault_injection import reference_receipt
from tests.jobs.network_namespaces import namespace_network
from tests.jobs.spread_run import SpreadRun, assert_same

pytestmark = [
    pytest.mark.ray,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="no ray: make test-ray"),
    pytest.mark.skipif(os.geteuid() != 0, reason="makes network namespaces"),
]
LANES = MLP | {"steps": 1500, "evaluate": {"every_steps": 500}, "checkpoint": {"every": "100 steps"}}


@pytest.fixture
def spread(job_dir, tmp_path, monkeypatch):
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    with namespace_network(3) as hosts, ray_on_hosts(hosts, tmp_path / "ray.log") as address:
        yield SpreadRun(hosts, job_dir, {"kind": "ray", "address": address})


def test_workers_on_two_nodes_exchange_over_tcp_and_one_survives_the_other(spread, run):
    with spread.driven(LANES):
        spread.wait_for_workers(2)
        pids = spread.pids()
        assert {spread.host_of(pid).name for pid in pids.values()} == {host.name for host in spread.hosts[1:]}
        addresses = {event["listens"] for event in spread.events() if event.kind == "run_started"}
        assert all(address.startswith(spread.hosts[0].address) for address in addresses)
        doomed = sorted(spread.carriers())[-1]
        spread.host_of(pids[doomed]).end_processes()
        spread.wait_until(lambda events: doomed not in spread.carriers() and spread.trains())
        receipt = spread.finish()
    assert_same(receipt, reference_receipt(run, LANES))
    assert receipt["deaths_survived"] == 1
