"""All routes of the API."""

from __future__ import annotations

from typing import Any

from shoal.spec.base import Spec
from shoal.web import acting, answers, compressions, inspecting, open_metrics, queueing, reading, searches, work_answers
from shoal.web.run_lists import ListQuery, RunLists
from shoal.web.stream import StreamQuery, Streams
from shoal.web.table import ApiRoute, NoInput

RUN = "/api/v1/runs/{run}"
ACTED = (200, 202)


def api_routes(sessions: acting.SessionRoutes, streams: Streams) -> list[ApiRoute]:
    return [*_public_routes(sessions), *_reading_routes(streams), *_work_routes(), *_acting_routes()]


def _public_routes(sessions: acting.SessionRoutes) -> list[ApiRoute]:
    begin, end = sessions.begin, sessions.end
    return [
        ApiRoute("GET", "/healthz", "public", "Whether the server answers", reading.health, answers.HealthAnswer),
        ApiRoute("POST", "/api/v1/session", "public", "Exchange a one-time code or a token for a cookie", begin,
                 dict[str, Any], body=acting.SecretBody),
        ApiRoute("POST", "/api/v1/session/end", "read", "End the session of the cookie", end, dict[str, bool]),
    ]  # fmt: skip


def _get(path: str, summary: str, handler: Any, answer: Any, query: type[Spec] = NoInput, **more: Any) -> ApiRoute:
    return ApiRoute("GET", path, "read", summary, handler, answer, query, **more)


def _reading_routes(streams: Streams) -> list[ApiRoute]:
    sse, text = "text/event-stream", open_metrics.MEDIA_TYPE
    return [
        _get("/api/v1/me", "Who asks, and what that may do", reading.me, answers.IdentityAnswer),
        _get("/api/v1/runs", "Runs: filtered, sorted, some at a time", RunLists().list_runs, answers.RunList,
             ListQuery),
        _get("/api/v1/compare", "Runs side by side", reading.compare_runs, answers.Comparison, reading.CompareQuery),
        _get("/api/v1/stream", "New events of runs as they come", streams.open_stream, str, StreamQuery,
             media_type=sse),
        _get("/api/v1/storage", "What runs occupy on disk, and the trash", reading.show_storage,
             answers.StorageAnswer, reading.StorageQuery, whole=True),
        _get("/api/v1/operations/{operation}", "How something that was asked for goes", acting.show_operation,
             answers.OperationAnswer),
        _get(RUN, "The state of a run", reading.show_run, answers.RunPage),
        _get(f"{RUN}/series", "Curves in bins that keep every extreme", reading.show_series, answers.SeriesList,
             reading.SeriesQuery),
        _get(f"{RUN}/events", "Events after a position", reading.show_events, answers.EventsPage,
             reading.EventsQuery),
        _get(f"{RUN}/timeline", "Where each worker's time went", reading.show_timeline, answers.TimelinePage,
             reading.TimelineQuery),
        _get(f"{RUN}/logs", "Logs of workers and servers", reading.list_logs, list[answers.LogRow]),
        _get(f"{RUN}/search", "Lines of all logs that contain a text", reading.search_logs, answers.FoundLines,
             reading.SearchQuery),
        _get(f"{RUN}/logs/{{log}}", "Lines of a log", reading.show_log, answers.LogLines, reading.LogQuery),
        _get(f"{RUN}/profiles", "Profiles of some steps", inspecting.list_profiles, list[work_answers.ProfileRow]),
        _get(f"{RUN}/profiles/{{profile}}", "The trace of a profile, for chrome://tracing", inspecting.send_trace, str,
             media_type="application/gzip"),
        _get(f"{RUN}/receipt", "The receipt", reading.show_receipt, answers.ReceiptAnswer),
        _get(f"{RUN}/job", "The job file", reading.show_job, answers.JobText),
        _get(f"{RUN}/diff", "What differs from another run", reading.diff_runs, answers.Comparison,
             reading.DiffQuery),
        _get("/metrics", "Live runs as OpenMetrics", open_metrics.show_metrics, str, media_type=text),
    ]  # fmt: skip


def _work_routes() -> list[ApiRoute]:
    """Searches, compressions and the queue."""
    done, entry = answers.OperationAnswer, "/api/v1/queue/{job}"
    return [
        _get("/api/v1/searches", "Searches, the newest first", searches.list_searches, work_answers.SearchList),
        _get("/api/v1/searches/{run}", "Trials, best so far, front and importance of a search", searches.show_search,
             work_answers.SearchPage, searches.TrialsQuery),
        _get("/api/v1/compressions", "Compressions, the newest first", compressions.list_compressions,
             work_answers.CompressionList),
        _get(f"{RUN}/compression", "The ladder of a compression", compressions.show_ladder, work_answers.LadderPage),
        _get("/api/v1/queue", "What runs, what waits and why", queueing.show_queue, work_answers.QueueAnswer,
             queueing.QueueQuery, whole=True),
        _get(entry, "A job of the queue and its history", queueing.show_entry, work_answers.QueueEntryPage, whole=True),
        ApiRoute("POST", "/api/v1/queue", "submit", "Put the job of a run into the queue again", queueing.submit_run,
                 done, body=queueing.SubmitBody, whole=True, statuses=ACTED),
        ApiRoute("POST", f"{entry}/cancel", "operate", "Cancel a job; a running one is saved and stopped",
                 queueing.cancel_entry, done, whole=True, statuses=ACTED),
        ApiRoute("POST", f"{entry}/priority", "operate", "Change the priority of a job", queueing.change_priority,
                 done, body=queueing.PriorityBody, whole=True, statuses=ACTED),
        ApiRoute("POST", f"{entry}/release", "submit", "Let a held or failed job go on", queueing.release_entry,
                 done, whole=True, statuses=ACTED),
    ]  # fmt: skip


def _acting_routes() -> list[ApiRoute]:
    done = answers.OperationAnswer
    return [
        ApiRoute("POST", f"{RUN}/stop", "operate", "Save the run and stop it", acting.stop_run, done, statuses=ACTED),
        ApiRoute("POST", f"{RUN}/resume", "submit", "Continue the run in a new process", acting.resume_run, done,
                 statuses=ACTED),
        ApiRoute("POST", f"{RUN}/scale", "operate", "Change the number of workers or servers", acting.scale_run, done,
                 body=acting.ScaleBody, statuses=ACTED),
        ApiRoute("POST", f"{RUN}/drain", "operate", "Let a worker or server leave", acting.drain_worker, done,
                 body=acting.DrainBody, statuses=ACTED),
        ApiRoute("GET", f"{RUN}/model", "operate", "The exported weights", inspecting.send_model, str,
                 media_type="application/octet-stream"),
        ApiRoute("POST", f"{RUN}/stacks", "operate", "Where every thread of every worker is now", acting.show_stacks,
                 done, statuses=ACTED),
        ApiRoute("POST", f"{RUN}/profile", "operate", "Profile some steps on all workers", acting.profile_run, done,
                 body=acting.ProfileBody, statuses=ACTED),
        ApiRoute("POST", f"{RUN}/tags", "operate", "Change the tags", acting.tag_run, done, body=acting.TagBody,
                 statuses=ACTED),
        ApiRoute("POST", f"{RUN}/delete", "operate", "Move the run, or its checkpoints, to the trash",
                 acting.delete_run, done, body=acting.DeleteBody, statuses=ACTED),
        ApiRoute("POST", f"{RUN}/compact", "operate", "Pack events and logs of a finished run, or unpack them",
                 acting.compact_run, done, body=acting.CompactBody, statuses=ACTED),
        ApiRoute("POST", "/api/v1/storage/plan", "operate", "What a cleanup by these rules would do",
                 acting.plan_cleanup, answers.CleanupPlan, body=acting.PlanBody, whole=True),
        ApiRoute("POST", "/api/v1/storage/apply", "operate", "Do exactly what a plan lists",
                 acting.apply_cleanup, done, body=acting.ApplyBody, whole=True, statuses=ACTED),
        ApiRoute("POST", "/api/v1/trash/{entry}/restore", "operate", "Undo a deletion", acting.restore_run, done,
                 whole=True, statuses=ACTED),
        ApiRoute("POST", "/api/v1/trash/empty", "operate", "Delete for good what is in the trash", acting.empty, done,
                 body=acting.EmptyTrashBody, whole=True, statuses=ACTED),
    ]  # fmt: skip
