"""Hosts that are reached through the user's own ssh: its keys, its configuration, its known hosts."""

from __future__ import annotations

import shlex
from functools import partial

from shoal.errors import ShoalError, error
from shoal.fleet.agents.agent_pipe import SetupCommand
from shoal.fleet.engine import Node
from shoal.fleet.engines.host_link import AgentHost
from shoal.spec.engine import SshEngineConfig, SshHost

AGENT_MODULE = "shoal.fleet.agents.host_agent"
CONNECT_TIMEOUT_S = 10
ALIVE_INTERVAL_S, ALIVE_COUNT = 2, 3
"""ssh gives a silent host up after interval times count."""
SSH_FAILED = 255
COMMAND_NOT_FOUND = (126, 127)


def ssh_nodes(config: SshEngineConfig) -> list[Node]:
    """The hosts as nodes. Their cores and memory are unknown before they are reached; `seats` is what they are for."""
    return [
        Node(one.host, cores=one.seats, memory_bytes=0, gpus=0, shares_run_dir=False, seats=one.seats)
        for one in config.hosts
    ]


def ssh_hosts(config: SshEngineConfig, *, setup: SetupCommand) -> list[AgentHost]:
    return [
        AgentHost(node, ssh_command(config, one), setup, partial(explain_ssh, one, config.python_of(one)))
        for one, node in zip(config.hosts, ssh_nodes(config), strict=True)
    ]


def ssh_command(config: SshEngineConfig, host: SshHost) -> tuple[str, ...]:
    """Never asks a question, and never trusts an unknown host: that is for the user to decide, once, by hand."""
    options = {
        "BatchMode": "yes",
        "ConnectTimeout": CONNECT_TIMEOUT_S,
        "ServerAliveInterval": ALIVE_INTERVAL_S,
        "ServerAliveCountMax": ALIVE_COUNT,
    }
    settings = [word for name, value in options.items() for word in ("-o", f"{name}={value}")]
    own = ["-F", config.config] if config.config else []
    remote = f"exec {shlex.join([config.python_of(host), '-P', '-m', AGENT_MODULE])}"
    return ("ssh", "-T", *own, *settings, "--", host.host, remote)


def explain_ssh(host: SshHost, python: str, code: int, errors: str) -> ShoalError:
    """Why the agent of a host did not start, from the exit code of ssh and what it printed."""
    lines = errors.strip().splitlines()
    said = next((line for line in reversed(lines) if line.strip()), "it said nothing")[:300]
    where = f"host {host.host}"
    if code == SSH_FAILED and "Host key verification failed" in errors:
        fix = f"Connect once by hand, `ssh {host.host}`, and compare the key that it shows."
        return error("SH652", f"the key of {host.host} is unknown, or has changed: {said}", where=where, fix=fix)
    if code == SSH_FAILED and "Permission denied" in errors:
        return error("SH652", f"{host.host} does not accept your key: {said}", where=where)
    if code == SSH_FAILED:
        return error("SH651", f"{host.host} cannot be reached: {said}", where=where)
    if code in COMMAND_NOT_FOUND:
        return error("SH653", f"there is no {python} on {host.host}: {said}", where=where)
    return error("SH653", f"{python} on {host.host} cannot run Shoal's agent: {said}", where=where)
