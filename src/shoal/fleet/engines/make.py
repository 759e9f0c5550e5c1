"""The one place that chooses an implementation of Engine."""

from __future__ import annotations

from collections.abc import Mapping

from shoal.fleet.engine import Engine, Node
from shoal.fleet.engines.local import LocalEngine, this_machine
from shoal.fleet.forkserver import ForkServer
from shoal.spec.engine import EngineConfig
from shoal.spec.run_paths import RunPaths


def capacity_of(config: EngineConfig) -> list[Node]:
    """What an engine of this kind could use now, for decisions before an engine exists."""
    match config.kind:
        case "local":
            return [this_machine()]


def make_engine(
    config: EngineConfig, paths: RunPaths, fork_server: ForkServer, *, environment: Mapping[str, str] | None = None
) -> Engine:
    """The engine of one run. The caller owns the fork server and closes it after the engine."""
    match config.kind:
        case "local":
            return LocalEngine(fork_server, paths, environment=environment)
