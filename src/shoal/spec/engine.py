"""Where workers run, what happens when they join or leave, and how processes reach each other."""

from __future__ import annotations

from typing import Literal

from pydantic import NonNegativeInt, PositiveFloat

from shoal.spec.base import Spec


class LocalEngineConfig(Spec):
    """Workers and servers are processes on this machine."""

    kind: Literal["local"] = "local"


EngineConfig = LocalEngineConfig
"""The engine section of a job: one class per `kind`. Today there is one."""


class ElasticConfig(Spec):
    """Behaviour when workers or the driver die, and when some workers are slower than others.

    `restarts`: how often all workers may die together, or one may die before it can train. `patience_s`: seconds that
    workers whose driver died wait for another before they save and exit. `balance`: faster workers get more lanes.
    """

    restarts: NonNegativeInt = 3
    patience_s: PositiveFloat = 60.0
    balance: bool = True


class NetworkConfig(Spec):
    """How processes reach each other. `listen`: the address of this machine on which workers on other machines can
    join.

    `tls`: a directory with cert.pem, key.pem and ca.pem, which encrypt all TCP connections.
    """

    listen: str = "127.0.0.1"
    tls: str | None = None
