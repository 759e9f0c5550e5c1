"""Events as lines for users: pure functions from events and the state of a run to text."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Mapping
from typing import Any

from shoal.errors import plural
from shoal.events import Event, RunState
from shoal.events.run_state import describe_difference
from shoal.spec.receipt import InitialWeights, describe_lost_residual
from shoal.terminal import formatting

MAX_TENSOR_NAMES = 5
_PLAN_KINDS = ("plan", "replan")


def event_line(event: Event, state: RunState) -> str:
    """The line for an event that has just been applied to the state; '' if none is shown."""
    repeats_another_worker = (event.kind == "built" and event.who != state.built_by) or (
        event.kind in ("note", "weights_loaded", "view") and state.last_note_is_repeat
    )
    return "" if repeats_another_worker or event.get("again") else describe_event(event)


def note_lines(state: RunState) -> list[str]:
    """The lines of the run's notes, except those on its plan, which `terminal.plan` prints."""
    lines = (describe_event(event) for event in state.notes if event.kind not in _PLAN_KINDS)
    return [line for line in lines if line]


def describe_event(event: Event) -> str:
    """'' for a kind that has no line."""
    describe = _LINES.get(event.kind)
    return describe(event) if describe else ""


def describe_choice(choice: Mapping[str, Any]) -> str:
    """A choice of the planner in a few words."""
    number, hosts, threads = (int(choice.get(what, 1)) for what in ("workers", "hosts", "threads"))
    parts = [plural(number, "worker"), f"({choice['how']})"]
    parts += [f"on {hosts} hosts"] if hosts > 1 else []
    parts += [f"with {threads} threads each"] if threads > 1 else []
    return " ".join(parts)


def describe_layout(layout: Mapping[str, Any]) -> str:
    """How the workers share the model."""
    cuts = f", cut at {', '.join(layout['cuts'])}" if layout["cuts"] else ""
    return f"shard: {layout['shard']} over {layout['ways']}, {plural(layout['replicas'], 'replica')}{cuts}"


def join_hint(run: str, address: str, *, tls: bool = False) -> str:
    """How workers on other machines can join; '' if they cannot reach the run."""
    host = address.rpartition(":")[0].strip("[]")
    if not host or host == "localhost" or _is_loopback(host):
        return ""
    tls_option = " --tls DIR" if tls else ""
    return f"join with: SHOAL_TOKEN=$(shoal token {run}) shoal join {address}{tls_option} --trust-code"


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a host name
        return False


def _run_started(event: Event) -> str:
    return join_hint(event["run"], event.get("listens", ""), tls=event.get("tls", False))


def _plan(event: Event) -> str:
    return f"plan: {describe_choice(event['choice'])}: {event['reason']}"


def _replan(event: Event) -> str:
    said, true = (1000 * event[what]["step_s"] for what in ("prediction", "truth"))
    return f"plan: a step takes {true:.3g} ms instead of {said:.3g} ms; {event['reason']}"


def _built(event: Event) -> str:
    parts = ", ".join(f"{formatting.count(n)} {name}" for name, n in event["samples"].items())
    skipped = f", {plural(event['skipped'], 'bad row')} skipped" if event["skipped"] else ""
    known = event.get("parameters")  # absent if no worker has the whole model
    parameters = f"{plural(known, 'parameter')}, " if known else ""
    return (
        f"{parameters}samples: {parts}{skipped}; "
        f"{plural(event['steps'], 'step')}, {plural(event['lanes'], 'lane')}, {event['device']}"
    )


def _evaluated(event: Event) -> str:
    name = "" if event["split"] == "validation" else f" on {event['split']}"
    return f"step {event.step}: evaluated{name}: {formatting.metrics(event['metrics'])}"


def _self_checked(event: Event) -> str:
    why = event.get("why", "")
    return f"not exact: {describe_difference(why, event.get('objects', ()))}" if why else ""


def _view(event: Event) -> str:
    why = str(event.get("why", ""))
    return "" if why == "finished" else why


def _left(event: Event) -> str:
    why = event.get("why", "")
    return "" if why == "finished" else f"{event.who} left at step {event.step} ({why})"


def _caught_up(event: Event) -> str:
    source = event["source"]
    return f"{event.who} got step {event.step} from {source if ' ' in source else f'the memory of {source}'}"


def _evicted(event: Event) -> str:
    host = f" on {event['host']}" if event.get("host") else ""
    return f"{event.get('worker') or event.get('server', '')}{host} was evicted: {event['reason']}"


def _weights_loaded(event: Event) -> str:
    loaded = InitialWeights.from_fields(event.fields)
    return "; ".join([f"initialised from {loaded}", *loaded.left_out(shown=MAX_TENSOR_NAMES)])


def _servers_wanted(event: Event) -> str:
    return f"the run wants {plural(event['number'], 'server')}: {event['why']}" if event.get("why") else ""


def _residual_lost(event: Event) -> str:
    return describe_lost_residual(event["lane"], event.get("worker", ""), event.step)


_LINES: Mapping[str, Callable[[Event], str]] = {
    "run_started": _run_started,
    "plan": _plan,
    "replan": _replan,
    "built": _built,
    "resumed": lambda e: f"the run resumed at step {e.step} from {e.get('source', 'a checkpoint')}",
    "steps_lost": lambda e: f"no checkpoint was saved: the workers make {plural(e['steps'], 'step')} again",
    "view": _view,
    "caught_up": _caught_up,
    "evaluated": _evaluated,
    "save_failed": lambda e: f"the checkpoint of step {e.step} could not be saved: {e['reason']}; training goes on",
    "saved": lambda e: f"step {e.step}: saving works again" if e.get("recovered") else "",
    "self_checked": _self_checked,
    "save_skipped": lambda e: f"no checkpoint at step {e.step}: the last one is still being written",
    "checkpoint_invalid": lambda e: f"the checkpoint of step {e.step} is invalid: {e['reason']}",
    "cleanup_failed": lambda e: f"old checkpoints could not be removed: {e['reason']}",
    "export_skipped": lambda e: f"{e['what']} was not exported: {e['reason']}",
    "loader_restarted": lambda e: f"a loader process of {e.who} {e['reason']}; another one builds its batch again",
    "note": lambda e: str(e["message"]),
    "alert": lambda e: f"alert: {e['text']}",
    "weights_loaded": _weights_loaded,
    "evicted": _evicted,
    "refused": lambda e: f"{e.get('name') or 'a process'} at {e.get('address')} was refused: {e['reason']}",
    "worker_died": lambda e: f"{e['worker']} died: {e['reason']}",
    "servers_wanted": _servers_wanted,
    "server_died": lambda e: f"{e['server']} died: {e['reason']}",
    "server_left": lambda e: f"{e['server']} left",
    "servers_lost": lambda e: f"the servers lost parameters: {e['reason']}",
    "residual_lost": _residual_lost,
    "left": _left,
    "printed": lambda e: str(e["text"]),
}
"""The kinds that have a line. The others are visible in the progress bar, the tables and the receipt."""
