"""Routes about the queue: what runs, what waits and why; submit, cancel, release, priority."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from starlette.responses import Response

from shoal.errors import error
from shoal.jobs.queue import client
from shoal.plan.queueing.entry import ENDED, MAX_PRIORITY, QueueEntry
from shoal.plan.queueing.work import TRAINING, SearchWork
from shoal.spec.base import Spec
from shoal.spec.load import load_job
from shoal.web import work_answers as answers
from shoal.web.access import OWNER
from shoal.web.acting import begin_operation
from shoal.web.table import Call

Override = Annotated[str, Field(min_length=1, max_length=300)]
EntryNumber = Annotated[int, Field(ge=1, lt=1 << 62)]
Priority = Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)]
ORDER = {"running": 0, "held": 1, "waiting": 2}


class QueueQuery(Spec):
    limit: int = Field(200, ge=1, le=5000)


class SubmitBody(Spec):
    """The job of the run `run` again, with fields changed as by `--set`."""

    run: str = Field(min_length=1, max_length=300)
    set: list[Override] = Field(default_factory=list, max_length=50)
    priority: Priority = 0
    after: list[EntryNumber] = Field(default_factory=list, max_length=100)


class PriorityBody(Spec):
    priority: Priority


def show_queue(call: Call) -> answers.QueueAnswer:
    """Those that run, are held and wait, then the last that ended."""
    view = client.look(call.site.runs)
    shown = sorted(view.entries.values(), key=lambda one: (ORDER.get(one.state, 3), -one.ended_t, one.id))
    states = [entry.state for entry in view.entries.values()]
    return answers.QueueAnswer(
        served=bool(view.daemon_pid),
        total=len(states),
        counts={state: states.count(state) for state in (*ORDER, *ENDED) if state in states},
        quotas=view.quotas or {},
        rows=[_row(entry, view) for entry in shown[: call.query.limit]],
    )


def show_entry(call: Call) -> answers.QueueEntryPage:
    number = _number(call)
    view = client.look(call.site.runs)
    if number not in view.entries:
        raise error("SH646", f"there is no job {number} in the queue")
    changes = [
        answers.QueueChange(t=row.t, state=row.state, workers=row.workers, reason=row.reason)
        for row in client.read_history(call.site.runs, number)
    ]
    return answers.QueueEntryPage(entry=_row(view.entries[number], view), history=changes)


def submit_run(call: Call) -> Response:
    """Puts the job into the queue, and starts the daemon if none lives: it outlives this server."""
    body: SubmitBody = call.body
    paths = call.find(body.run)
    job = load_job(paths.job, overrides=body.set)
    work = SearchWork() if paths.search_journal.is_file() else TRAINING
    user = "" if call.identity.name == OWNER else call.identity.name.removeprefix("token ")

    def act() -> dict[str, object]:
        made = client.submit([job], runs=call.site.runs, user=user, priority=body.priority, after=body.after, work=work)
        return {"id": made[0].id, "state": made[0].state}

    return begin_operation(call, f"submit the job of {body.run} to", act)


def cancel_entry(call: Call) -> Response:
    number = _number(call)
    return begin_operation(
        call, f"cancel job {number} of", lambda: {"id": number, "state": client.cancel(call.site.runs, number).state}
    )


def release_entry(call: Call) -> Response:
    number = _number(call)
    return begin_operation(
        call, f"release job {number} of", lambda: {"id": number, "state": client.release(call.site.runs, number).state}
    )


def change_priority(call: Call) -> Response:
    number = _number(call)

    def act() -> dict[str, object]:
        entry = client.set_priority(call.site.runs, number, call.body.priority)
        return {"id": number, "priority": entry.priority}

    return begin_operation(call, f"change the priority of job {number} of", act)


def _number(call: Call) -> int:
    text = call.names["job"]
    if not (text.isascii() and text.isdecimal() and len(text) < 19):
        raise error("SH646", "jobs of the queue have numbers")
    return int(text)


def _row(entry: QueueEntry, view: client.QueueView) -> answers.QueueRow:
    return answers.QueueRow(
        id=entry.id,
        name=entry.name,
        user=entry.user,
        priority=entry.priority,
        state=entry.state,
        why=view.why(entry),
        run=entry.run,
        workers=entry.workers,
        least=entry.needs.least,
        most=entry.needs.most,
        after=list(entry.after),
        attempts=entry.attempts,
        submitted_t=entry.submitted_t,
        started_t=entry.started_t,
        ended_t=entry.ended_t,
    )
