"""The servers of a run as a person sees them: one line each, and one for all."""

from __future__ import annotations

from rich.table import Table

from shoal.events import Picture
from shoal.events.picture import Server
from shoal.terminal import words

MOST_SERVERS = 16
GONE = ("dead", "left", "failed")


def lines(p: Picture) -> Table:
    """Empty for a run without servers."""
    table = Table.grid(padding=(0, 2), pad_edge=True)
    here = [server for server in p.servers.values() if server.state not in GONE]
    for server in here[:MOST_SERVERS]:
        table.add_row(server.name, server.state, *_held(server), _served(server), server.host, style="dim")
    if len(here) > MOST_SERVERS:
        table.add_row(f"and {len(here) - MOST_SERVERS} more", style="dim")
    return table


def summary(p: Picture) -> str:
    """'' for a run without servers."""
    if not p.servers:
        return ""
    facts = [f"table {p.table}", f"{len(p.serving)} of {p.wanted_servers} servers serve"]
    if p.server_deaths:
        facts.append(f"{p.server_deaths} died, {p.failovers} failovers")
    mean, most = p.staleness
    if most:
        facts.append(f"staleness {mean:.2f} on average, {most} at most")
    if (spared := _spared_bytes(p)) > 0:
        facts.append(f"{words.size(spared)} saved by the codec")
    return ", ".join(facts)


def _held(server: Server) -> tuple[str, str]:
    coming = f", {words.size(server.filling_bytes)} on the way" if server.filling_bytes else ""
    return f"{words.size(server.primary_bytes)} primary", f"{words.size(server.backup_bytes)} backup{coming}"


def _served(server: Server) -> str:
    served = server.served
    if not served:
        return ""
    moved = f"{words.size(served.get('bytes_in', 0))} in, {words.size(served.get('bytes_out', 0))} out"
    return f"{words.count(served.get('pushes', 0))} pushes, {moved}"


def _spared_bytes(p: Picture) -> float:
    told = [server.served for server in p.servers.values() if "bytes_plain" in server.served]
    return sum(served["bytes_plain"] - served.get("bytes_in", 0) for served in told)
