"""Routes that change something. Each calls the function that the command line calls."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from pydantic import Field
from starlette.responses import Response

from shoal.errors import ShoalError, error, error_from_fields
from shoal.fleet.profile_request import MAX_PROFILED_STEPS
from shoal.jobs import commands, run_dir
from shoal.jobs.inspection import profiles
from shoal.jobs.inspection.stacks import collect_stacks
from shoal.jobs.queue.access_tokens import Identity
from shoal.jobs.resume import job_to_resume
from shoal.spec.base import Spec
from shoal.spec.run_paths import RunPaths
from shoal.storage import cleanup, compaction
from shoal.storage.tags import change_tags
from shoal.storage.trash import delete_for_good, empty_trash, move_to_trash, restore
from shoal.web import answers
from shoal.web.access import AccessControl
from shoal.web.site import Operation
from shoal.web.table import Api, Call, json_response, session_secret, without_paths

POLL_S = 0.1
SETTLED_S = 2.0
"""A driver that ends later than this tells why in the events of the run."""
MAX_TOLD_BYTES = 1 << 16
_TOLD_ERROR = re.compile(r"^(?P<code>SH\d{3}) (?P<message>.*)\n +→ (?P<fix>.*)$", re.MULTILINE)


class ScaleBody(Spec):
    workers: int | None = Field(None, ge=1, le=100_000)
    servers: int | None = Field(None, ge=1, le=100_000)


class DrainBody(Spec):
    who: str = Field(min_length=1, max_length=40)


class ProfileBody(Spec):
    steps: int = Field(20, ge=1, le=MAX_PROFILED_STEPS)


class TagBody(Spec):
    add: list[str] = Field(default_factory=list, max_length=20)
    remove: list[str] = Field(default_factory=list, max_length=100)


class DeleteBody(Spec):
    """`confirm`: the run's name again. `part`: '' for the whole run, or checkpoints. `for_good`: without undo, for
    which a full disk has no room."""

    confirm: str = Field(max_length=300)
    part: str = Field("", max_length=20)
    for_good: bool = False


class EmptyTrashBody(Spec):
    """`confirm` is the word `empty`."""

    confirm: str = Field(max_length=20)
    older_than_s: float = Field(0.0, ge=0)


class PlanBody(Spec):
    """Rules of a cleanup, as `shoal gc` has them."""

    days: float = Field(30.0, ge=0, le=100_000)
    keep: str = Field("newest=2", max_length=100)
    total: str = Field("", max_length=30)
    status: str = Field("", max_length=200)
    checkpoints: bool = False
    compact: bool = False


class CompactBody(Spec):
    """`undo`: unpack it again."""

    undo: bool = False


class ApplyBody(Spec):
    """The hash of a plan that was shown."""

    plan: str = Field(min_length=1, max_length=100)


class SecretBody(Spec):
    """A one-time code or a token."""

    secret: str = Field(min_length=1, max_length=200)


def _refuse_searches(paths: RunPaths) -> None:
    if paths.search_journal.is_file():
        fix = f"Use the command line: shoal search stop {paths.name}, shoal search resume {paths.name}."
        raise error("SH632", f"'{paths.name}' is a search", fix=fix)


def stop_run(call: Call) -> Response:
    _refuse_searches(call.paths)

    def act() -> dict[str, Any]:
        state = commands.stop(call.paths)
        return {"status": state.status, "saved_step": state.saved_step}

    return begin_operation(call, "stop", act)


def resume_run(call: Call) -> Response:
    """Starts `shoal resume` as a process of its own: it outlives this server."""
    paths = call.paths.parent_run
    _refuse_searches(paths)
    if not paths.asked_compression.is_file():
        job_to_resume(paths, ())
    if run_dir.is_driven(paths):
        raise error("SH602", f"'{paths.name}' is driven already")
    return begin_operation(call, "resume", lambda: {"pid": _start_driver(paths, call.site.stopping)})


def _start_driver(paths: RunPaths, stopping: threading.Event) -> int:
    """Returns its process id when it has driven the run for a moment, or has ended well; raises why it ended."""
    descriptor = os.open(paths.root / "driver.log", os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
    words = [sys.executable, "-m", "shoal", "resume", "--runs", str(paths.root.parent), "--quiet", "--", paths.name]
    with os.fdopen(descriptor, "r+b", buffering=0) as log:
        begin = log.seek(0, os.SEEK_END)
        started = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, close_fds=True
        )
        driven_s = 0.0
        while started.poll() is None and driven_s < SETTLED_S and not stopping.wait(POLL_S):
            driven_s += POLL_S if run_dir.is_driven(paths) else 0.0
        if started.returncode:
            log.seek(begin)
            raise _why_it_ended(started.returncode, log.read(MAX_TOLD_BYTES).decode(errors="replace"))
    return started.pid


def _why_it_ended(code: int, told: str) -> ShoalError:
    """The error that `shoal resume` printed, or its last line."""
    if found := list(_TOLD_ERROR.finditer(told)):
        return error_from_fields(found[-1].groupdict())
    last = (told.strip().splitlines() or ["it said nothing"])[-1][:500]
    return error("SH612", f"the driver ended with {code}: {last}", fix="See driver.log in the run.")


def scale_run(call: Call) -> Response:
    _refuse_searches(call.paths)

    def act() -> dict[str, Any]:
        answer = commands.scale(call.paths, call.body.workers, servers=call.body.servers)
        return {"wanted": answer.wanted, "servers_wanted": answer.servers_wanted, "notes": answer.notes}

    return begin_operation(call, "scale", act)


def drain_worker(call: Call) -> Response:
    _refuse_searches(call.paths)

    def act() -> dict[str, Any]:
        seat, answer = commands.drain(call.paths, call.body.who)
        went = commands.wait_for_departure(call.paths, seat)
        return {"who": seat.name, "wanted": answer.wanted, "went": went or "the run ended first"}

    return begin_operation(call, f"drain {call.body.who} of", act)


def show_stacks(call: Call) -> Response:
    """Signals the processes, so it is not for readers."""
    return begin_operation(
        call, "ask for the stacks of", lambda: {"processes": [asdict(one) for one in collect_stacks(call.paths)]}
    )


def profile_run(call: Call) -> Response:
    def act() -> dict[str, Any]:
        return {
            "profile": profiles.profile_run(call.paths, steps=call.body.steps, stopping=call.site.stopping.is_set).name
        }

    return begin_operation(call, f"profile {call.body.steps} steps of", act)


def tag_run(call: Call) -> Response:
    def act() -> dict[str, Any]:
        name = call.paths.parent_run.name
        return {"tags": change_tags(call.site.runs, name, add=call.body.add, remove=call.body.remove)}

    return begin_operation(call, "tag", act)


def delete_run(call: Call) -> Response:
    if call.body.confirm != call.paths.name:
        raise error("SH609", "the name is not repeated", where="confirm", fix="Send the run's name as `confirm`.")

    def act() -> dict[str, Any]:
        paths, runs, part = call.paths, call.site.runs, call.body.part
        if call.body.for_good:
            done: dict[str, Any] = {"run": paths.name, "freed_bytes": delete_for_good(paths, runs, part=part)}
        else:
            entry = move_to_trash(paths, runs, part=part)
            done = {"entry": entry.name, **entry.fields}
        call.site.states.drop(paths)
        call.site.histories.drop(paths)
        return done

    return begin_operation(call, "delete for good" if call.body.for_good else "delete", act)


def compact_run(call: Call) -> Response:
    act = compaction.expand_run if call.body.undo else compaction.compact_run
    what = "expand" if call.body.undo else "compact"
    return begin_operation(call, what, lambda: asdict(act(call.paths)))


def restore_run(call: Call) -> Response:
    return begin_operation(call, "restore", lambda: {**restore(call.site.runs, call.names["entry"]).fields})


def empty(call: Call) -> Response:
    if call.body.confirm != "empty":
        raise error("SH609", "it is not confirmed", where="confirm", fix="Send `empty` as `confirm`.")

    def act() -> dict[str, Any]:
        gone = empty_trash(call.site.runs, older_than_s=call.body.older_than_s)
        return {"entries": len(gone), "freed_bytes": sum(one.fields["size_bytes"] for one in gone)}

    return begin_operation(call, "empty the trash of", act)


def plan_cleanup(call: Call) -> answers.CleanupPlan:
    """Shows what would go; nothing but the plan itself is written."""
    rules = cleanup.read_rules(**call.body.model_dump())
    items = cleanup.make_plan(call.site.runs, rules)
    rows = [answers.PlannedRow(run=one["run"], part=one["part"], freed_bytes=one["freed_bytes"]) for one in items]
    name = cleanup.save_plan(call.site.runs, items) if items else ""
    return answers.CleanupPlan(plan=name, freed_bytes=sum(one.freed_bytes for one in rows), items=rows)


def apply_cleanup(call: Call) -> Response:
    def act() -> dict[str, Any]:
        done = cleanup.apply_plan(call.site.runs, call.body.plan)
        for entry in done.entries:
            paths = RunPaths(call.site.runs / entry.fields["run"])
            call.site.states.drop(paths)
            call.site.histories.drop(paths)
        freed = sum(entry.fields["size_bytes"] for entry in done.entries)
        freed += sum(one.before_bytes - one.after_bytes for one in done.compacted)
        return {
            "moved": [entry.fields["run"] for entry in done.entries],
            "compacted": [one.run for one in done.compacted],
            "freed_bytes": freed,
            "stays": done.stays,
        }

    return begin_operation(call, "clean up", act)


def show_operation(call: Call) -> answers.OperationAnswer:
    operation = call.site.operation(call.names["operation"])
    if not call.identity.sees(operation.run.partition("~")[0]):
        raise error("SH601", "there is no such operation")
    return _describe(operation)


def begin_operation(call: Call, what: str, act: Callable[[], dict[str, Any]]) -> Response:
    """200 if it is done already, 202 if it goes on; the answer has its number."""
    operation = call.site.begin(what, call.names.get("run", "all runs"), call.identity.name, act)
    found = _describe(operation)
    return json_response(call.request, found, status=202 if found.state == "running" else 200)


def _describe(operation: Operation) -> answers.OperationAnswer:
    facts = {"operation": operation.name, "what": operation.what, "run": operation.run}
    if not operation.future.done():
        return answers.OperationAnswer(**facts, state="running")
    failure = operation.future.exception()
    if failure is None:
        return answers.OperationAnswer(**facts, state="done", result=operation.future.result())
    known = failure if isinstance(failure, ShoalError) else error("SH605", str(failure))
    told = {"code": known.code, "message": without_paths(known.message), "where": "", "fix": without_paths(known.fix)}
    return answers.OperationAnswer(**facts, state="failed", error=told)


class SessionRoutes:
    """Exchange a code or a token for a cookie, and end the session."""

    def __init__(self, access: AccessControl, *, cookie: str, secure: bool) -> None:
        self._access, self._cookie, self._secure = access, cookie, secure
        self.api: Api | None = None

    def begin(self, call: Call) -> Response:
        found = self._access.begin_session(call.body.secret)
        assert self.api is not None
        if found is None:
            self.api.count_failure(call.request)
            problem = {"type": "about:blank", "title": "the code is used or wrong", "status": 401}
            return json_response(call.request, problem, status=401)
        secret, identity = found
        self.api.count_request(identity)
        answer = json_response(call.request, _describe_identity(identity))
        answer.set_cookie(
            self._cookie,
            secret,
            max_age=30 * 24 * 3600,
            httponly=True,
            samesite="strict",
            secure=self._secure,
            path="/",
        )
        return answer

    def end(self, call: Call) -> Response:
        self._access.end_session(session_secret(call.request, self._cookie))
        answer = json_response(call.request, {"ok": True})
        answer.delete_cookie(self._cookie, httponly=True, samesite="strict", secure=self._secure, path="/")
        return answer


def _describe_identity(identity: Identity) -> dict[str, Any]:
    runs = None if identity.runs is None else sorted(identity.runs)
    return {"name": identity.name, "role": identity.role, "runs": runs, "expires_t": identity.expires_t}
