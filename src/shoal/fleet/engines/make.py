"""The one place that chooses an implementation of Engine."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import partial

from shoal.errors import ShoalError, error
from shoal.fleet.agents.agent_pipe import (
    MAX_SILENCE_S,
    PING_INTERVAL_S,
    PONG_TIMEOUT_S,
    AttachCommand,
    SetupCommand,
)
from shoal.fleet.engine import Engine, Node
from shoal.fleet.engines.agent_pool import AgentPool
from shoal.fleet.engines.agent_records import AgentRecords
from shoal.fleet.engines.agents import AgentEngine
from shoal.fleet.engines.host_link import AgentHost
from shoal.fleet.engines.host_use import HostUse
from shoal.fleet.engines.local import LocalEngine, this_machine
from shoal.fleet.engines.machines import MAX_SEATS, machine_host, machine_nodes, run_of_queue
from shoal.fleet.engines.ray import actor_host, ray_nodes
from shoal.fleet.engines.slurm import find_allocation, job_host, slurm_nodes, step_hosts
from shoal.fleet.engines.ssh import AGENT_MODULE, ssh_hosts, ssh_nodes
from shoal.fleet.forkserver import ForkServer
from shoal.spec.engine import (
    EngineConfig,
    LocalEngineConfig,
    MachinesEngineConfig,
    RayEngineConfig,
    SlurmEngineConfig,
    SshEngineConfig,
)
from shoal.spec.job import Job
from shoal.spec.run_paths import RunPaths

FIXED_VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OMP_WAIT_POLICY",
    "CUBLAS_WORKSPACE_CONFIG",
    "PYTHONHASHSEED",
    "PYTHONUNBUFFERED",
)
"""Of the fork server's environment, what must be the same on every host. The rest is the host's own."""


def capacity_of(config: EngineConfig) -> list[Node]:
    """What an engine of this kind could use now, for decisions before an engine exists."""
    match config:
        case LocalEngineConfig(apart=False):
            return [this_machine()]
        case LocalEngineConfig():
            return pretended_machines(config.machines)
        case SshEngineConfig():
            return ssh_nodes(config)
        case SlurmEngineConfig():
            return slurm_nodes(config, find_allocation())
        case RayEngineConfig():
            return ray_nodes(config)
        case MachinesEngineConfig():
            return machine_nodes()


def make_engine(
    config: EngineConfig,
    paths: RunPaths,
    fork_server: ForkServer,
    *,
    environment: Mapping[str, str] | None = None,
    patience_s: float = MAX_SILENCE_S,
    gang_size: int = 1,
    host_use: HostUse | None = None,
) -> Engine:
    """The engine of one run. The caller owns the fork server and closes it after the engine. Engines with agents take
    its environment and modules alone. `patience_s`: how long agents wait for another driver, where they can.
    `gang_size`: so many processes are of use only together, which Ray can heed. `host_use`: what the runs beside this
    one have on the same hosts, where Shoal and no scheduler of a cluster chooses the host."""
    match config:
        case LocalEngineConfig(apart=False):
            return LocalEngine(fork_server, paths, environment=environment)
        case LocalEngineConfig():
            hosts = apart_hosts(config.machines, fork_server, notice=config.notice or "")
            return AgentEngine(hosts, paths, host_use=host_use)
        case SshEngineConfig():
            hosts = ssh_hosts(config, setup=host_setup(config, fork_server)[0])
            return AgentEngine(hosts, paths, host_use=host_use)
        case SlurmEngineConfig():
            return slurm_engine(config, paths, fork_server, host_use=host_use)
        case RayEngineConfig():
            return ray_engine(config, paths, fork_server, patience_s=patience_s, gang_size=gang_size)
        case MachinesEngineConfig():
            return machines_engine(config, paths, fork_server)


def make_job_engine(job: Job, paths: RunPaths, fork_server: ForkServer, *, host_use: HostUse | None = None) -> Engine:
    """The engine of a run of this job."""
    return make_engine(
        job.engine,
        paths,
        fork_server,
        patience_s=job.elastic.patience_s,
        gang_size=job.workers_per_replica,
        host_use=host_use,
    )


def slurm_engine(
    config: SlurmEngineConfig, paths: RunPaths, fork_server: ForkServer, *, host_use: HostUse | None = None
) -> Engine:
    """Steps of the allocation in which this process runs, or a job per worker if it runs in none."""
    setup, threads = host_setup(config, fork_server)
    if allocation := find_allocation():
        return AgentEngine(step_hosts(config, allocation, setup=setup), paths, host_use=host_use)
    make_host = partial(job_host, config, name=f"shoal-{paths.name}", threads=threads, setup=setup)
    return AgentPool(
        lambda number, _gang: make_host(number), paths, nodes=slurm_nodes(config, None), max_hosts=config.jobs
    )


def ray_engine(
    config: RayEngineConfig,
    paths: RunPaths,
    fork_server: ForkServer,
    *,
    patience_s: float = MAX_SILENCE_S,
    gang_size: int = 1,
) -> Engine:
    setup, threads = host_setup(config, fork_server)
    records = AgentRecords(paths)
    longest_s = max(patience_s, PONG_TIMEOUT_S) + PING_INTERVAL_S  # workers leave first
    setup = setup.model_copy(update={"patience_s": longest_s})
    host = partial(actor_host, config, keeper=records.kept.keeper, threads=threads, patience_s=longest_s)
    return AgentPool(
        partial(host, setup=setup),
        paths,
        nodes=ray_nodes(config),
        max_hosts=config.seats,
        gang_size=gang_size,
        records=records,
        attach_host=partial(host, setup=AttachCommand()),
    )


def machines_engine(config: MachinesEngineConfig, paths: RunPaths, fork_server: ForkServer) -> Engine:
    setup, threads = host_setup(config, fork_server)
    make_host = partial(machine_host, config, run=run_of_queue(config, paths), threads=threads, setup=setup)
    return AgentPool(lambda number, _gang: make_host(number), paths, nodes=machine_nodes(), max_hosts=MAX_SEATS)


def host_setup(config: EngineConfig, fork_server: ForkServer) -> tuple[SetupCommand, int]:
    """What the agent of a host is told first, and the threads of a worker there."""
    fixed = fixed_variables(fork_server.environment)
    setup = SetupCommand(environment=fixed, modules=fork_server.modules, notice=config.notice or "")
    return setup, int(fixed.get("OMP_NUM_THREADS", "1"))


def fixed_variables(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: environment[name] for name in FIXED_VARIABLES if name in environment}


def apart_hosts(machines: int, fork_server: ForkServer, *, notice: str = "") -> list[AgentHost]:
    """Agents on this machine that pretend to be on machines of their own."""
    command = (sys.executable, "-P", "-m", AGENT_MODULE)
    fixed = fixed_variables(fork_server.environment)
    setups = [
        SetupCommand(environment=fixed, modules=fork_server.modules, machine=f"machine-{n}", notice=notice)
        for n in range(machines)
    ]
    return [
        AgentHost(node, command, setup, explain_agent, environment=fork_server.environment)
        for node, setup in zip(pretended_machines(machines), setups, strict=True)
    ]


def pretended_machines(machines: int) -> list[Node]:
    real = this_machine()
    cores, memory_bytes = max(1, real.cores // machines), real.memory_bytes // machines
    return [Node(f"machine-{n}", cores, memory_bytes, real.gpus, shares_run_dir=False) for n in range(machines)]


def explain_agent(code: int, errors: str) -> ShoalError:
    said = errors.strip().splitlines()[-1:] or ["it said nothing"]
    return error("SH629", f"the agent ended with exit code {code}: {said[0][:300]}")
