"""Where workers run, what happens when they join or leave, and how processes reach each other."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, field_validator, model_validator

from shoal.spec.base import Spec, parse_size

MAX_HOSTS = 1024
_HOST = re.compile(r"[A-Za-z0-9_.:@\[\]%][A-Za-z0-9_.:@\[\]%-]{0,254}")
_SRUN_OPTION = re.compile(r"--[a-z][a-z-]{0,63}(=[^\x00-\x1f]{1,1024})?")
_OWN_SRUN_OPTIONS = frozenset(
    f"--{name}"
    for name in (
        *("jobid", "nodelist", "nodes", "ntasks", "ntasks-per-node", "overlap", "input", "output", "error", "label"),
        *("pty", "multi-prog", "kill-on-bad-exit", "wait", "test-only", "immediate", "unbuffered", "quiet", "mpi"),
        *("cpu-bind", "no-kill", "chdir"),
    )
)
_PYTHON = Annotated[str, Field(min_length=1, max_length=1024)]


_NOTICE = Annotated[str, Field(pattern=r"^(/|https?://)[^\x00-\x20]{1,1023}$")]


class LocalEngineConfig(Spec):
    """Workers and servers are processes on this machine.

    `apart`: they do not use the run's directory, as on a cluster without a shared file system: code, checkpoints, the
    model and output go through the driver. `machines`: on how many machines they pretend to be then. `notice` and
    `price`: see SshEngineConfig.
    """

    kind: Literal["local"] = "local"
    apart: bool = False
    machines: Annotated[int, Field(ge=1, le=64)] = 1
    notice: _NOTICE | None = None
    price: PositiveFloat | None = None

    @property
    def shares_run_dir(self) -> bool:
        return not self.apart


class SshHost(Spec):
    """A host as ssh names it, how many workers it is for, and the interpreter there. A text alone is a host."""

    host: str
    seats: PositiveInt = 1
    python: _PYTHON | None = None

    @model_validator(mode="before")
    @classmethod
    def _from_name(cls, value: Any) -> Any:
        return {"host": value} if isinstance(value, str) else value

    @field_validator("host")
    @classmethod
    def _is_no_option(cls, host: str) -> str:
        if not _HOST.fullmatch(host):
            raise ValueError("write a host or user@host, as ssh takes it, without spaces and not beginning with '-'")
        return host


class SshEngineConfig(Spec):
    """Workers and servers run on these hosts, which the user's ssh reaches without a question.

    `hostfile`: a file with the hosts instead, one per line. `python`: the interpreter on hosts that name none.
    `config`: a file for ssh to read instead of the user's own. `notice`: a file or URL on each machine that says that
    the machine will be taken away. `price`: of the place of one worker or server for an hour, for `shoal plan`.
    """

    kind: Literal["ssh"]
    hosts: Annotated[list[SshHost], Field(max_length=MAX_HOSTS)] = Field(default_factory=list)
    hostfile: str | None = None
    python: _PYTHON = "python3"
    config: str | None = None
    notice: _NOTICE | None = None
    price: PositiveFloat | None = None

    @field_validator("hosts")
    @classmethod
    def _named_once(cls, hosts: list[SshHost]) -> list[SshHost]:
        names = [one.host for one in hosts]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"{twice[0]} is named twice: give one entry with more seats")
        return hosts

    @model_validator(mode="after")
    def _names_hosts(self) -> SshEngineConfig:
        if bool(self.hosts) == (self.hostfile is not None):
            raise ValueError("give `hosts` or `hostfile`, one of the two")
        return self

    @property
    def shares_run_dir(self) -> bool:
        return False

    def python_of(self, host: SshHost) -> str:
        return host.python or self.python


class SlurmEngineConfig(Spec):
    """Workers are steps of Slurm. Inside an allocation they share its nodes; outside, each is a job of its own.

    `seats`: workers per node of the allocation; left out, as its cores allow. `jobs`: at most so many jobs at the same
    time outside of an allocation. `options`: for srun, such as `--partition=gpu`. `python`: the interpreter on the
    nodes; left out, the driver's own.
    """

    kind: Literal["slurm"]
    seats: PositiveInt | None = None
    jobs: Annotated[int, Field(ge=1, le=MAX_HOSTS)] = 64
    options: Annotated[list[str], Field(max_length=64)] = Field(default_factory=list)
    python: _PYTHON | None = None
    notice: _NOTICE | None = None
    price: PositiveFloat | None = None

    @field_validator("options")
    @classmethod
    def _are_options(cls, options: list[str]) -> list[str]:
        for one in options:
            name = one.partition("=")[0]
            if not _SRUN_OPTION.fullmatch(one):
                raise ValueError(f"write {one!r} as one word that begins with --, such as --partition=gpu")
            if name in _OWN_SRUN_OPTIONS:
                raise ValueError(f"{name} is set by Shoal")
        return options

    @property
    def shares_run_dir(self) -> bool:
        return False


class RayEngineConfig(Spec):
    """Workers run on a cluster of Ray, each in a placement group of its own, or one for all of a sharded replica.

    `address`: of the cluster; `auto` is the one of this machine. `seats`: at most so many workers. `resources`: of a
    worker, besides a CPU for each thread, such as `GPU: 1`. `python`: the interpreter on the nodes; left out, Ray's.
    """

    kind: Literal["ray"]
    address: Annotated[str, Field(pattern=r"^(auto|[A-Za-z0-9_.:\[\]-]{1,255}:[0-9]{1,5})$")] = "auto"
    seats: Annotated[int, Field(ge=1, le=MAX_HOSTS)] = 64
    resources: dict[Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_.:-]{0,63}$")], PositiveFloat] = Field(
        default_factory=dict, max_length=32
    )
    python: _PYTHON | None = None
    notice: _NOTICE | None = None
    price: PositiveFloat | None = None

    @property
    def shares_run_dir(self) -> bool:
        return False


class MachinesEngineConfig(Spec):
    """Workers run on the machines that offer their cores to a queue. `shoal up --listen` sets it for the jobs of the
    queue. `daemon`: the private file with the address of the queue's daemon. `price`: see SshEngineConfig.
    """

    kind: Literal["machines"]
    daemon: Annotated[str, Field(min_length=1, max_length=4096)]
    notice: _NOTICE | None = None
    price: PositiveFloat | None = None

    @property
    def shares_run_dir(self) -> bool:
        return False


EngineConfig = Annotated[
    LocalEngineConfig | SshEngineConfig | SlurmEngineConfig | RayEngineConfig | MachinesEngineConfig,
    Field(discriminator="kind"),
]
"""The engine section of a job: one class per `kind`."""


class ElasticConfig(Spec):
    """Behaviour when workers or the driver die, and when some workers are slower than others.

    `restarts`: how often all workers may die together, or one may die before it can train. `patience_s`: seconds that
    workers whose driver died wait for another before they save and exit. `balance`: faster workers get more lanes.
    """

    restarts: NonNegativeInt = 3
    patience_s: PositiveFloat = 60.0
    balance: bool = True


MIN_LOG_BYTES = 1_000_000


class LimitsConfig(Spec):
    """What one worker may take of its machine: memory (`2 GB`) and cores (`1.5`); left out: no limit. `log`: what each
    of its two logs may occupy on disk."""

    memory: str | None = None
    cpus: PositiveFloat | None = None
    log: str = "256 MB"

    @field_validator("memory")
    @classmethod
    def _known_size(cls, memory: str | None) -> str | None:
        if memory is not None:
            parse_size(memory)
        return memory

    @field_validator("log")
    @classmethod
    def _enough_log(cls, log: str) -> str:
        if parse_size(log) < MIN_LOG_BYTES:
            raise ValueError("a log has at least 1 MB")
        return log

    @property
    def memory_bytes(self) -> int | None:
        return None if self.memory is None else parse_size(self.memory)

    @property
    def log_bytes(self) -> int:
        return parse_size(self.log)


MAX_PORT = 65535
_PORTS = re.compile(r"(\d{1,5})-(\d{1,5})")


def parse_ports(text: str | None) -> range:
    """The ports of a range such as 40000-40100, both ends included; without a text port 0, for which the kernel
    chooses. ValueError if it is no range of ports."""
    if not text:
        return range(1)
    found = _PORTS.fullmatch(text)
    if not found or not 0 < int(found[1]) <= int(found[2]) <= MAX_PORT:
        raise ValueError("write a range of ports such as 40000-40100")
    return range(int(found[1]), int(found[2]) + 1)


class NetworkConfig(Spec):
    """How processes reach each other. `listen`: the address of this machine on which workers on other machines can
    join. `port`: the driver's port, for a firewall; left out, any. `ports`: those of workers and servers, such as
    40000-40100. `advertise`: the name or address under which workers of the engine reach the driver, if it is another.

    `tls`: a directory with cert.pem, key.pem and ca.pem, which encrypt all TCP connections.
    """

    listen: str = "127.0.0.1"
    port: Annotated[int, Field(ge=1, le=65535)] | None = None
    ports: Annotated[str, Field(max_length=11)] | None = None
    advertise: Annotated[str, Field(min_length=1, max_length=255)] | None = None
    tls: str | None = None

    @field_validator("ports")
    @classmethod
    def _is_range(cls, ports: str | None) -> str | None:
        parse_ports(ports)
        return ports
