"""Slurm: an agent per node of an allocation, or per job outside of one, each started by srun with pipes.

The processes end with the agent, the agent with its step, and the step with srun. The exit code of srun means nothing:
it is 0 for a step whose node went down.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shoal.errors import ShoalError, error
from shoal.fleet.agents.agent_pipe import SetupCommand
from shoal.fleet.engine import Node
from shoal.fleet.engines.host_link import AgentHost
from shoal.fleet.engines.ssh import AGENT_MODULE
from shoal.spec.engine import SlurmEngineConfig

TIED_MODULE = "shoal.fleet.agents.tied_command"
NOTICE_S = 120
"""Before a time limit, Slurm sends SIGTERM so many seconds early, and up to 60 s more."""
QUERY_TIMEOUT_S = 30.0
_STEP_OPTIONS = ("--nodes=1", "--ntasks=1", "--mpi=none", "--cpu-bind=none", "--kill-on-bad-exit=0", "--unbuffered")
_PROGRESS = re.compile("queued and waiting|has been allocated|lacks support for cpu binding")
_NO_PYTHON = re.compile(r"No module named|execve\(\)|No such file or directory")
_COUNT = re.compile(r"(\d{1,6})(?:\(x(\d{1,6})\))?")


@dataclass(frozen=True)
class Allocation:
    """The allocation in which this process runs: its number, and the cores of each node."""

    job: str
    cores: Mapping[str, int]


def find_allocation(environment: Mapping[str, str] | None = None) -> Allocation | None:
    """From the variables that Slurm sets. None outside of an allocation. SH656 if they cannot be read."""
    environment = os.environ if environment is None else environment
    job, nodes = environment.get("SLURM_JOB_ID"), environment.get("SLURM_JOB_NODELIST")
    if not job or not nodes:
        return None
    names = expand_nodes(nodes)
    counts = parse_counts(environment.get("SLURM_JOB_CPUS_PER_NODE", "1"))
    if len(counts) != len(names):
        counts = [counts[0]] * len(names)
    return Allocation(job, dict(zip(names, counts, strict=True)))


def expand_nodes(nodes: str) -> list[str]:
    """`n[1-3]` as Slurm itself expands it."""
    command = ["scontrol", "show", "hostnames", nodes]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=QUERY_TIMEOUT_S, check=True)
    except FileNotFoundError as failure:
        raise missing_slurm("scontrol") from failure
    except subprocess.SubprocessError as failure:
        raise error("SH656", f"scontrol cannot read the list of nodes {nodes!r}: {failure}") from failure
    if not (names := answer.stdout.split()):
        raise error("SH656", f"the allocation has no nodes: {nodes!r}")
    return names


def parse_counts(text: str) -> list[int]:
    """`2(x3),4` is 2, 2, 2, 4. SH656 if it is something else."""
    found: list[int] = []
    for part in text.split(","):
        match = _COUNT.fullmatch(part.strip())
        if match is None or len(found) > 1 << 16:
            raise error("SH656", f"SLURM_JOB_CPUS_PER_NODE is {text[:100]!r}")
        found += [int(match[1])] * min(int(match[2] or 1), 1 << 16)
    return found


def slurm_nodes(config: SlurmEngineConfig, allocation: Allocation | None) -> list[Node]:
    """The nodes of the allocation, or Slurm as one node with room for `jobs` workers."""
    if allocation is None:
        return [Node("slurm", cores=config.jobs, memory_bytes=0, gpus=0, shares_run_dir=False, seats=config.jobs)]
    return [
        Node(name, cores=cores, memory_bytes=0, gpus=0, shares_run_dir=False, seats=config.seats)
        for name, cores in allocation.cores.items()
    ]


def step_hosts(config: SlurmEngineConfig, allocation: Allocation, *, setup: SetupCommand) -> list[AgentHost]:
    """One step per node of the allocation; it may use all of the node's cores, and others may use them too."""
    return [
        AgentHost(node, step_command(config, allocation, node), setup, explain_slurm)
        for node in slurm_nodes(config, allocation)
    ]


def step_command(config: SlurmEngineConfig, allocation: Allocation, node: Node) -> tuple[str, ...]:
    where = (f"--jobid={allocation.job}", f"--nodelist={node.name}", "--overlap", f"--cpus-per-task={node.cores}")
    return _tied(config, [*_STEP_OPTIONS, *where, *config.options])


def job_host(config: SlurmEngineConfig, number: int, *, name: str, threads: int, setup: SetupCommand) -> AgentHost:
    """A job for one worker, which waits in Slurm's queue."""
    node = Node(f"job-{number}", cores=threads, memory_bytes=0, gpus=0, shares_run_dir=False, seats=1)
    own = [*_STEP_OPTIONS, f"--job-name={name}", f"--cpus-per-task={threads}", f"--signal=TERM@{NOTICE_S}"]
    # Slurm takes the last of two equal options
    return AgentHost(node, _tied(config, [*own, *config.options]), setup, explain_slurm, queued=True)


def _tied(config: SlurmEngineConfig, options: Sequence[str]) -> tuple[str, ...]:
    if shutil.which("srun") is None:
        raise missing_slurm("srun")
    tie = (sys.executable, "-P", "-m", TIED_MODULE, str(os.getpid()))
    return (*tie, "srun", *options, config.python or sys.executable, "-P", "-m", AGENT_MODULE)


def missing_slurm(program: str) -> ShoalError:
    fix = "Run this on a login or compute node of the cluster."
    return error("SH607", f"the program {program} is missing", fix=fix)


def explain_slurm(code: int, errors: str) -> ShoalError:
    """Why the agent of a step did not start, from what srun or the interpreter printed."""
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    by_srun = [line for line in lines if line.startswith("srun:") and not _PROGRESS.search(line)]
    errors_of_srun = [line for line in by_srun if "error:" in line]
    told = (errors_of_srun[:1] or by_srun[:1] or lines[-1:] or ["it said nothing"])[0][:300]
    if no_python := next((line for line in lines if _NO_PYTHON.search(line)), ""):
        return error("SH653", f"the interpreter cannot run Shoal's agent on a node: {no_python[:300]}")
    return error("SH656", f"srun ended with exit code {code}: {told}")
