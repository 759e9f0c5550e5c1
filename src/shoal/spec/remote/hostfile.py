"""A file of hosts as MPI and DeepSpeed have it: one host per line, with `slots=N`; `#` begins a comment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import ValidationError

from shoal.errors import ErrorGroup, ShoalError, error
from shoal.spec.engine import MAX_HOSTS, EngineConfig, SshEngineConfig, SshHost
from shoal.spec.job import Job

MAX_FILE_BYTES = 1 << 20
WHERE = "engine.hostfile"


def with_hosts_of_file(job: Job) -> Job:
    """The job with the hosts of its hostfile instead of the file. ErrorGroup if the file cannot be used."""
    return job.model_copy(update={"engine": engine_with_hosts(job.engine, Path(job.base_dir))})


def engine_with_hosts(engine: EngineConfig, base: Path) -> EngineConfig:
    """The engine with the hosts of its hostfile, which lies at `base`, instead of the file."""
    if not isinstance(engine, SshEngineConfig) or engine.hostfile is None:
        return engine
    path = base / Path(engine.hostfile).expanduser()
    try:
        with path.open("rb") as file:
            text = file.read(MAX_FILE_BYTES).decode()
        hosts = parse_hostfile(text)
        return SshEngineConfig(**engine.model_dump(exclude={"hosts", "hostfile"}), hosts=hosts)
    except (OSError, UnicodeDecodeError) as failure:
        raise ErrorGroup([error("SH301", f"{engine.hostfile} cannot be read: {failure}", where=WHERE)]) from failure
    except ValidationError as failure:
        raise ErrorGroup([error("SH106", f"{engine.hostfile}: {_first(failure)}", where=WHERE)]) from failure


def parse_hostfile(text: str) -> list[SshHost]:
    """The hosts, in order. ErrorGroup with an error for each bad line."""
    hosts: list[SshHost] = []
    problems: list[ShoalError] = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        try:
            hosts.append(SshHost(host=words[0], **_options(words[1:])))
        except (ValueError, ValidationError) as failure:
            why = _first(failure) if isinstance(failure, ValidationError) else str(failure)
            problems.append(error("SH106", f"line {number}: {why}", where=WHERE, fix="Write: HOST slots=4"))
    if not problems and not 0 < len(hosts) <= MAX_HOSTS:
        problems.append(error("SH106", f"the file names {len(hosts)} hosts", where=WHERE))
    if problems:
        raise ErrorGroup(problems)
    return hosts


def _options(words: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for word in words:
        name, _, value = word.partition("=")
        if name == "slots" and value.isdecimal() and value.isascii() and len(value) < 7:
            found["seats"] = int(value)
        elif name == "python" and value:
            found["python"] = value
        else:
            raise ValueError(f"'{word:.50}' is neither slots=N nor python=PATH")
    return found


def _first(failure: ValidationError) -> str:
    return str(failure.errors()[0]["msg"]).removeprefix("Value error, ")
