"""What was said and what was true stand side by side, turn by turn."""

from benchmarks.planner.__main__ import BETWEEN, HERE, _halved, rows

from shoal.plan.costs.model import Cluster, HostResources
from shoal.plan.costs.predict import predict
from tests.plan.cost_model_cases import FAST_LINK, LARGE_MODEL


def test_what_was_said_is_compared_within_a_turn():
    said = {"one": [10.0, 20.0, 40.0], "two": [15.0, 30.0, 60.0]}
    true = {"one": [5.0, 20.0, 20.0], "two": [10.0, 20.0, 50.0]}
    first, second = rows(said, true)
    assert (first["off"], first["said gain"], first["true gain"]) == (2.0, 1.0, 1.0)
    assert (second["off"], second["said gain"], second["true gain"]) == (1.5, 1.5, 2.0)


def test_two_hosts_on_one_machine_have_its_cores():
    machine = Cluster((HostResources(4, 8e9),) * 2, round_s=1e-3, add_bytes_s=1e9, crowding=1.25)
    assert _halved(machine).hosts == (HostResources(2, 4e9, speed=0.8),) * 2


def test_every_side_can_be_predicted():
    machine = Cluster((HostResources(4, 8e9),) * 2, round_s=1e-3, add_bytes_s=1e9)
    assert all(predict(it, LARGE_MODEL, machine, FAST_LINK).step_s > 0 for it in (*HERE.values(), *BETWEEN.values()))
