"""Live runs as OpenMetrics text, for Prometheus. Ended runs have no series: their number would only grow."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable

from starlette.responses import Response

from shoal.errors import ShoalError
from shoal.events import RunState
from shoal.web.table import Call

MEDIA_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"
LIVE = ("training", "starting")
Sample = tuple[str, dict[str, str], float]
HELP = {
    "shoal_run_step": ("gauge", "Committed steps of a live run."),
    "shoal_run_steps_wanted": ("gauge", "Steps that the run will make."),
    "shoal_run_loss": ("gauge", "Training loss of the newest step."),
    "shoal_run_samples_per_second": ("gauge", "Samples per second of all workers."),
    "shoal_run_workers": ("gauge", "Workers that train."),
    "shoal_run_deaths": ("counter", "Workers that died so far."),
    "shoal_run_saved_step": ("gauge", "Step of the newest checkpoint."),
    "shoal_run_metric": ("gauge", "A metric of the newest evaluation."),
    "shoal_run_worker_seconds": ("counter", "Time of all workers by kind."),
    "shoal_worker_samples_per_second": ("gauge", "Samples per second of one worker."),
    "shoal_worker_cpu_cores": ("gauge", "Cores that a worker keeps busy."),
    "shoal_worker_memory_bytes": ("gauge", "Memory that a worker has."),
    "shoal_worker_memory_room_bytes": ("gauge", "Memory that a worker may still take."),
    "shoal_worker_network_bytes_per_second": ("gauge", "What a worker exchanges with others."),
    "shoal_worker_device_memory_bytes": ("gauge", "Memory of a worker's GPU that is used."),
}  # fmt: skip


USAGE = {
    "shoal_worker_cpu_cores": "cpu", "shoal_worker_memory_bytes": "rss_bytes",
    "shoal_worker_memory_room_bytes": "room_bytes", "shoal_worker_network_bytes_per_second": "net_bytes_s",
    "shoal_worker_device_memory_bytes": "device_bytes",
}  # fmt: skip


def show_metrics(call: Call) -> Response:
    rows = [row for row in call.site.rows() if row["status"] in LIVE and call.identity.sees(row["run"])]
    samples: list[Sample] = []
    for row in rows:
        with contextlib.suppress(ShoalError, OSError):  # a run that goes meanwhile hides no other
            samples += _samples(row["run"], call.site.state(call.site.find(row["run"])))
    return Response(render(samples), media_type=MEDIA_TYPE)


def _samples(run: str, state: RunState) -> Iterable[Sample]:
    label = {"run": run}
    yield "shoal_run_step", label, state.step
    yield "shoal_run_steps_wanted", label, state.steps_total
    if state.loss is not None:
        yield "shoal_run_loss", label, state.loss
    yield "shoal_run_samples_per_second", label, state.samples_per_s
    yield "shoal_run_workers", label, len(state.training_workers)
    yield "shoal_run_deaths", label, state.deaths
    if state.saved_step is not None:
        yield "shoal_run_saved_step", label, state.saved_step
    for name, value in state.metrics.items():
        yield "shoal_run_metric", {**label, "metric": name}, value
    for kind, spent_s in state.times.items():
        yield "shoal_run_worker_seconds", {**label, "kind": kind.removesuffix("_s")}, spent_s
    for worker in state.training_workers:
        own = {**label, "worker": worker.name}
        yield "shoal_worker_samples_per_second", own, worker.samples_per_s
        for name, field in USAGE.items():
            if field in worker.usage:
                yield name, own, worker.usage[field]


def render(samples: Iterable[Sample]) -> str:
    by_name: dict[str, list[Sample]] = {}
    for sample in samples:
        by_name.setdefault(sample[0], []).append(sample)
    lines = []
    for name, (kind, text) in HELP.items():
        if name in by_name:
            lines += [f"# TYPE {name} {kind}", f"# HELP {name} {text}"]
            suffix = "_total" if kind == "counter" else ""
            lines += [f"{name}{suffix}{_labels(labels)} {_number(value)}" for _, labels, value in by_name[name]]
    return "\n".join([*lines, "# EOF"]) + "\n"


def _labels(labels: dict[str, str]) -> str:
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items()) + "}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def _number(value: float) -> str:
    if math.isfinite(value):
        return repr(float(value))
    return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"
