"""Every strategy keeps the contract."""

import pytest

from tests.strategies.strategy_contract import Body, StrategyContract

LOCAL = {"kind": "local", "every": 2, "rounds_per_sync": 2, "fragments": 2, "outer": "nesterov"}
BODIES = [
    Body("lanes"),
    Body("codec", {"codec": {"kind": "int8"}}),
    Body("codec with residuals", {"codec": {"kind": "sign"}}),
    Body("ddp", {"sync": {"kind": "ddp", "backend": "gloo"}}, any_number=False),
    Body("local SGD", {"sync": LOCAL}, steps=4),
    Body("parameter server", {"sync": {"kind": "server", "servers": 1, "backups": 0}}),
    Body("fsdp", {"shard": {"kind": "fsdp", "size": 2}, "workers": 2}, any_number=False, holds_all=False),
    Body(
        "pauses around lanes",
        {"faults": {"pause_probability": 0.5, "pause_s": 0.001}},
    ),
]


@pytest.fixture(params=BODIES, ids=lambda body: body.name)
def body(request):
    return request.param


class TestStrategies(StrategyContract):
    pass
