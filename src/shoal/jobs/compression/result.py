"""Writes the result of a compression as a run like any other: job, model, recipe, report, receipt."""

from __future__ import annotations

import contextlib
import csv
import html
import io
import math
import shutil
from pathlib import Path
from typing import Any

from shoal.checkpoint.model_check import verify_model
from shoal.events import EventWriter, load_state
from shoal.jobs.compression.workshop import Candidate, Workshop
from shoal.jobs.receipt import make_receipt
from shoal.jobs.run_health import write_receipt
from shoal.plan.compression import best_rungs, latency_ratio
from shoal.spec.compression.answers import ExportFacts
from shoal.spec.compression.config import CompressConfig
from shoal.spec.compression.measured import REPORT, CompressionReport, Recipe, RungReport
from shoal.spec.compression.steps import ModelShape
from shoal.spec.job import Job
from shoal.spec.load import save_job
from shoal.spec.run_paths import RunPaths, write_atomically

RECIPE = "recipe.json"
POINTS = "compression.csv"
PLOT = "compression.svg"


def write_result(
    paths: RunPaths, workshop: Workshop, chosen: Candidate, report: CompressionReport
) -> CompressionReport:
    """Everything but the parent's own files. The receipt is last: a run with one is complete."""
    job = _result_job(paths, workshop.job, chosen)
    facts = workshop.export(
        chosen,
        out=str(paths.model),
        info={"job": job.dump(), "step": 0, "metrics": _metrics(report)},
        program="program" in workshop.job.export,
    )
    artefact = _place_artefact(paths, chosen)
    notes = [*report.notes, *map(str, facts.skipped)]
    report = report.model_copy(update={"notes": notes, "rungs": [_without_path(one) for one in report.rungs]})
    recipe = Recipe(
        parent=report.parent,
        parent_sha256=report.parent_sha256,
        job_sha256=workshop.job.sha256(),
        steps=list(chosen.steps),
        artefact=artefact,
        artefact_sha256=chosen.artefact.sha256,
        weights_sha256=facts.weights_sha256,
    )
    save_job(job, paths.job)
    write_atomically(paths.root / RECIPE, recipe.model_dump_json(indent=2) + "\n")
    write_atomically(paths.root / REPORT, report.model_dump_json(indent=2) + "\n")
    write_atomically(paths.root / POINTS, points_csv(report))
    write_atomically(paths.root / PLOT, plot_svg(report))
    _end_run(paths, job, report, facts)
    shutil.rmtree(workshop.folder, ignore_errors=True)
    return report


def _without_path(rung: RungReport) -> RungReport:
    """Only the file's name: the files of attempts are removed at the end."""
    if rung.artefact is None:
        return rung
    artefact = rung.artefact.model_copy(update={"path": Path(rung.artefact.path).name})
    return rung.model_copy(update={"artefact": artefact})


def _result_job(paths: RunPaths, parent: Job, chosen: Candidate) -> Job:
    shape = ModelShape(steps=list(chosen.shape)) if chosen.shape else None
    name = paths.name.rpartition("-")[0]
    done = {"init_from": None, "shrink": None, "compress": CompressConfig()}
    return parent.model_copy(update={"name": name, "shape": shape, **done})


def _place_artefact(paths: RunPaths, chosen: Candidate) -> str:
    """The judged file, beside the weights; they are the same file if nothing else was made of them."""
    source = Path(chosen.artefact.path)
    if source.suffix != ".safetensors":
        shutil.copyfile(source, paths.model / source.name)
    return source.name


def _metrics(report: CompressionReport) -> dict[str, float]:
    quality = next((one.quality for one in report.rungs if one.name == report.chosen), None)
    found = {quality.metric: quality.value} if quality else {}
    return found | ({f"test/{report.test.metric}": report.test.value} if report.test else {})


def _end_run(paths: RunPaths, job: Job, report: CompressionReport, facts: ExportFacts) -> None:
    digest = facts.weights_sha256
    with contextlib.closing(EventWriter(paths.events, "driver")) as stream:
        stream.emit(
            "built",
            steps=0,
            steps_per_epoch=0,
            lanes=job.lane_count,
            samples=facts.samples,
            skipped=0,
            device="cpu",
            parameters=facts.parameters,
        )
        stream.emit(
            "finished",
            weights_sha256=digest,
            state_sha256=digest,
            samples_seen=0,
            metrics=_metrics(report),
            stopped="",
            platform=facts.platform,
        )
        verified = verify_model(paths.model, weights_sha256=digest)
        stream.emit("verified", weights_sha256=verified.weights_sha256, size_bytes=verified.size_bytes, verify_s=0.0)
        state = load_state(paths.events, paths.state_snapshot)
        write_receipt(paths, make_receipt(job, state, run=paths.name))
        stream.emit("run_ended", status="finished")


def points_csv(report: CompressionReport) -> str:
    """One row per rung, for a plot of size, latency and quality."""
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(
        ["rung", "size_bytes", "size_ratio", "latency_1", "latency_64", "metric", "drop", "drop_bound", "kept", "front"]
    )
    front = best_rungs(report.rungs)
    for one in report.rungs:
        rows.writerow([one.name, *_measured(one), int(one.kept), int(one in front)])
    return text.getvalue()


def _measured(one: RungReport) -> list[Any]:
    size = one.artefact.size_bytes if one.artefact else ""
    ratios = [one.latency.ratios[n].median if one.latency and n in one.latency.ratios else "" for n in (1, 64)]
    quality = [one.quality.value, one.quality.drop, one.quality.drop_bound] if one.quality else ["", "", ""]
    return [size, "" if one.size_ratio is None else one.size_ratio, *ratios, *quality]


def plot_svg(report: CompressionReport) -> str:
    """Size against drop: a point per rung with its bound as a line, filled if it was kept; the label has its latency.
    The rungs of the Pareto front are orange and joined."""
    rows = [one for one in report.rungs if one.size_ratio and one.quality]
    sizes = [math.log10(one.size_ratio or 1) for one in rows]
    left, right = min([-0.01, *sizes]), max([0.0, *sizes])
    drops = [value for one in rows if one.quality for value in (one.quality.drop, one.quality.drop_bound)]
    drops = [value for value in drops if math.isfinite(value)] or [0.0, 0.01]
    high, bottom = max(drops), min(drops)
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 760 420" font-family="sans-serif" font-size="11">',
        '<rect width="760" height="420" fill="white"/>',
        '<text x="300" y="412">size, as a share of the parent (logarithmic)</text>',
        '<text x="8" y="16">drop, and its 95 % bound</text>',
    ]

    def place(one: RungReport, value: float) -> tuple[float, float]:
        x = 60 + 480 * (math.log10(one.size_ratio or 1) - left) / (right - left)
        return x, 30 + 350 * (high - value) / max(high - bottom, 1e-9) if math.isfinite(value) else 20.0

    front = best_rungs(rows)
    joined = " ".join(f"{x:.0f},{y:.0f}" for x, y in (place(one, one.quality.drop) for one in front if one.quality))
    parts.append(f'<polyline points="{joined}" stroke="#e76f51" fill="none"/>')
    parts.append('<text x="480" y="16" fill="#e76f51">orange: nothing is smaller, faster and better</text>')
    for one in rows:
        assert one.quality is not None
        (x, y), (_, top) = place(one, one.quality.drop), place(one, one.quality.drop_bound)
        stroke = "#e76f51" if one in front else "#26a"
        fill = "#26a" if one.kept else "white"
        parts.append(f'<line x1="{x:.0f}" y1="{y:.0f}" x2="{x:.0f}" y2="{top:.0f}" stroke="#999"/>')
        parts.append(f'<circle cx="{x:.0f}" cy="{y:.0f}" r="5" stroke="{stroke}" fill="{fill}"/>')
        parts.append(f'<text x="{x + 8:.0f}" y="{y + 4:.0f}">{html.escape(_label(one))}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _label(one: RungReport) -> str:
    ratio = latency_ratio(one)
    return f"{one.name}, {one.size_ratio:.1%}" + ("" if ratio is None else f", latency {ratio:.0%}")
