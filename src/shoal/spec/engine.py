"""Where workers run, what happens when they come and go, and how processes reach each other."""

from __future__ import annotations

from typing import Literal

from pydantic import NonNegativeInt, PositiveFloat

from shoal.spec.base import Spec


class LocalEngineConfig(Spec):
    """Workers and servers are processes of this machine."""

    kind: Literal["local"] = "local"


EngineConfig = LocalEngineConfig
"""One section for each kind of engine, told apart by `kind`. Today there is one kind."""


class ElasticConfig(Spec):
    """What happens when workers die, when the driver dies, and when some workers are slower than others.

    `restarts`: how often all workers may die together, or one before it can train. `patience_s`: how long workers whose
    driver died wait for another before they save and leave. `balance`: lanes move to the workers that are faster.
    """

    restarts: NonNegativeInt = 3
    patience_s: PositiveFloat = 60.0
    balance: bool = True


class NetworkConfig(Spec):
    """How processes reach each other. `listen`: the address of this machine where workers from elsewhere may join.

    `tls`: a directory with cert.pem, key.pem and ca.pem; everything that goes over TCP is encrypted with them.
    """

    listen: str = "127.0.0.1"
    tls: str | None = None
