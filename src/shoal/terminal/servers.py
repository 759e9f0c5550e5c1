"""The servers of a run: one line each, and a summary line."""

from __future__ import annotations

from rich.table import Table

from shoal.events import RunState
from shoal.events.state_parts import ServerSummary
from shoal.terminal import formatting
from shoal.terminal.fact_table import fact_table

MAX_SERVERS = 16
GONE = ("dead", "left", "failed")


def server_table(p: RunState, width: int) -> Table:
    """What fits into `width` columns; no line wraps. Empty for a run without servers."""
    here = _here(p)
    more = f"and {len(here) - MAX_SERVERS} more" if len(here) > MAX_SERVERS else ""
    rows = [_facts(server) for server in here[:MAX_SERVERS]]
    return fact_table(rows, width, drop=("host", "traffic", "backup", "primary"), more=more)


def server_lines(p: RunState) -> list[str]:
    """A line for each server, with everything."""
    return ["  ".join(filter(None, _facts(server).values())) for server in _here(p)]


def _here(p: RunState) -> list[ServerSummary]:
    return [server for server in p.servers.values() if server.state not in GONE]


def _facts(server: ServerSummary) -> dict[str, str]:
    primary, backup = _held_cells(server)
    return {
        "name": server.name,
        "state": server.state,
        "primary": primary,
        "backup": backup,
        "traffic": _traffic(server),
        "host": server.host,
    }


def summary(p: RunState) -> str:
    """'' for a run without servers."""
    if not p.servers:
        return ""
    facts = [f"table {p.chunk_table_number}", f"{len(p.serving_servers)} of {p.wanted_servers} servers serve"]
    if p.server_deaths:
        facts.append(f"{p.server_deaths} died, {p.failovers} failover{'s' * (p.failovers != 1)}")
    mean, most = p.staleness
    if most:
        facts.append(f"staleness {mean:.2f} on average, {most} at most")
    if (spared := _codec_saved_bytes(p)) > 0:
        facts.append(f"{formatting.size(spared)} saved by the codec")
    return ", ".join(facts)


def _held_cells(server: ServerSummary) -> tuple[str, str]:
    coming = f", {formatting.size(server.filling_bytes)} on the way" if server.filling_bytes else ""
    return f"{formatting.size(server.primary_bytes)} primary", f"{formatting.size(server.backup_bytes)} backup{coming}"


def _traffic(server: ServerSummary) -> str:
    served = server.stats
    if not served:
        return ""
    moved = f"{formatting.size(served.get('bytes_in', 0))} in, {formatting.size(served.get('bytes_out', 0))} out"
    pushes = int(served.get("pushes", 0))
    return f"{pushes:,} push{'' if pushes == 1 else 'es'}, {moved}"


def _codec_saved_bytes(p: RunState) -> float:
    told = [server.stats for server in p.servers.values() if "bytes_plain" in server.stats]
    return sum(served["bytes_plain"] - served.get("bytes_in", 0) for served in told)
