"""Routes about compressions: every rung of a ladder, kept or not, and why."""

from __future__ import annotations

from shoal.spec.compression.measured import REPORT, CompressionReport, RungReport, read_report
from shoal.spec.run_paths import RunPaths
from shoal.web import work_answers as answers
from shoal.web.table import Call

NAME = "-compressed-"
MAX_LISTED = 500


def list_compressions(call: Call) -> answers.CompressionList:
    """The newest first. A run that still climbs has no report, and its parent is not known yet."""
    found = [row for row in call.site.rows() if NAME in row["run"] and call.identity.sees(row["run"])]
    found.sort(key=lambda row: (-(row["started_t"] or 0), row["run"]))
    return answers.CompressionList(
        rows=[
            _list_row(row["run"], row["status"], row["started_t"], _report(RunPaths(call.site.runs / row["run"])))
            for row in found[:MAX_LISTED]
        ]
    )


def _list_row(
    run: str, status: str, started_t: float | None, report: CompressionReport | None
) -> answers.CompressionRow:
    chosen = _chosen(report)
    return answers.CompressionRow(
        run=run,
        status=status,
        parent=report.parent if report else "",
        chosen=report.chosen if report else "",
        targets_met=report.targets_met if report else None,
        size_ratio=chosen.size_ratio if chosen else None,
        started_t=started_t,
    )


def show_ladder(call: Call) -> answers.LadderPage:
    return make_ladder(_report(call.paths), call.names["run"])


def make_ladder(report: CompressionReport | None, name: str) -> answers.LadderPage:
    if report is None:
        return answers.LadderPage(
            run=name, parent="", parent_sha256="", chosen="", targets_met=False, rungs=[], test=None, notes=[]
        )
    return answers.LadderPage(
        run=name,
        parent=report.parent,
        parent_sha256=report.parent_sha256,
        chosen=report.chosen,
        targets_met=report.targets_met,
        rungs=[_rung(one, chosen=one.name == report.chosen) for one in report.rungs],
        test=report.test.model_dump(mode="python") if report.test else None,
        notes=list(report.notes),
    )


def _rung(one: RungReport, *, chosen: bool) -> answers.RungRow:
    quality, latency = one.quality, one.latency
    return answers.RungRow(
        name=one.name,
        kept=one.kept,
        chosen=chosen,
        why=one.why,
        steps=[step.kind for step in one.steps],
        parameters=one.parameters,
        size_bytes=one.artefact.size_bytes if one.artefact else None,
        size_ratio=one.size_ratio,
        metric=quality.metric if quality else "",
        value=quality.value if quality else None,
        drop=quality.drop if quality else None,
        drop_bound=quality.drop_bound if quality else None,
        latency={
            str(batch): [ratio.low, ratio.median, ratio.high]
            for batch, ratio in (latency.ratios.items() if latency else ())
        },
    )


def _report(paths: RunPaths) -> CompressionReport | None:
    path = paths.root / REPORT
    return None if path.is_symlink() else read_report(path)


def _chosen(report: CompressionReport | None) -> RungReport | None:
    return next((one for one in report.rungs if one.name == report.chosen), None) if report else None
