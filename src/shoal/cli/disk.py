"""The verbs about what runs leave on disk: du, gc, trash, compact, archive, fetch."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from shoal.cli import output
from shoal.cli.options import RUNS, AsJson, RunName, Runs

DAY_S = 86400.0
PANEL = "Disk"


def register(app: typer.Typer) -> None:
    for verb in (du, gc, trash, compact, archive, fetch):
        app.command(rich_help_panel=PANEL)(verb)


def du(runs: Runs = RUNS, as_json: AsJson = False) -> None:
    """What each run occupies on disk, and what deleting it would free."""
    from shoal.storage.disk_usage import all_usage
    from shoal.terminal import access_reports

    access_reports.print_usage(all_usage(runs), as_json=as_json)


def gc(
    older: Annotated[float, typer.Option("--older", min=0, help="Only runs unchanged for so many days.")] = 30,
    keep: Annotated[str, typer.Option(help="Keep of each job: newest=2, or newest=2,best=1.")] = "newest=2",
    total: Annotated[str, typer.Option(help="Only as many as bring all runs below 200GB.", show_default=False)] = "",
    status: Annotated[str, typer.Option(help="Only these: failed,stopped", show_default=False)] = "",
    checkpoints: Annotated[
        bool, typer.Option("--checkpoints", help="Only the checkpoints of finished runs with a model.")
    ] = False,
    compact: Annotated[bool, typer.Option("--compact", help="Compact finished runs instead; nothing goes.")] = False,
    plan: Annotated[bool, typer.Option("--plan", help="Only show the plan, as without --apply.")] = False,
    apply: Annotated[str, typer.Option(help="Apply the plan with this hash.", show_default=False)] = "",
    runs: Runs = RUNS,
    as_json: AsJson = False,
) -> None:
    """Clean up: shows a plan and its hash; --apply HASH does exactly that, and what goes moves to the trash."""
    from shoal.storage import cleanup
    from shoal.terminal import access_reports

    if apply and not plan:
        done = cleanup.apply_plan(runs, apply)
        if done.compacted:
            access_reports.print_compactions(done.compacted, as_json=as_json)
        else:
            access_reports.print_trash(done.entries, as_json=as_json)
        for line in done.stays:
            print(line, file=sys.stderr)
        return
    rules = cleanup.read_rules(
        days=older, keep=keep, total=total, status=status, checkpoints=checkpoints, compact=compact
    )
    items = cleanup.make_plan(runs, rules)
    access_reports.print_plan(items, cleanup.save_plan(runs, items) if items else "", as_json=as_json)


def trash(
    delete: Annotated[str, typer.Option(help="Move this run to the trash.", show_default=False)] = "",
    part: Annotated[str, typer.Option(help="With --delete: only its checkpoints.", show_default=False)] = "",
    for_good: Annotated[bool, typer.Option("--for-good", help="With --delete: without undo.")] = False,
    restore: Annotated[str, typer.Option(help="Put a run back.", show_default=False)] = "",
    empty: Annotated[bool, typer.Option("--empty", help="Delete for good.")] = False,
    days: Annotated[float, typer.Option(min=0, help="With --empty: only what is older.")] = 0,
    runs: Runs = RUNS,
    as_json: AsJson = False,
) -> None:
    """Deleted runs: list them, delete one, put one back, or free their bytes."""
    from shoal.errors import error
    from shoal.jobs import run_dir
    from shoal.storage import trash as bin_
    from shoal.terminal import access_reports, formatting

    if bool(delete) + bool(restore) + empty > 1:
        raise error("SH609", "they are done one at a time", where="--delete, --restore, --empty")
    if (part or for_good) and not delete:
        raise error("SH609", "they say how to delete a run", where="--part, --for-good", fix="Add --delete RUN.")
    if delete and for_good:
        freed = bin_.delete_for_good(run_dir.find(delete, runs), runs, part=part)
        what = f"the {part} of {delete} are" if part else f"{delete} is"
        print(f"{what} deleted: {formatting.size(freed)} are free", file=sys.stderr)
    elif delete:
        access_reports.print_trash([bin_.move_to_trash(run_dir.find(delete, runs), runs, part=part)], as_json=as_json)
    elif restore:
        print(f"{bin_.restore(runs, restore).fields['run']} is back", file=sys.stderr)
    elif empty:
        access_reports.print_trash(bin_.empty_trash(runs, older_than_s=days * DAY_S), as_json=as_json)
    else:
        access_reports.print_trash(bin_.list_trash(runs), as_json=as_json)


def compact(
    run: RunName,
    undo: Annotated[bool, typer.Option("--undo", help="Unpack it again.")] = False,
    runs: Runs = RUNS,
    as_json: AsJson = False,
) -> None:
    """Pack events and logs of a finished run. Nothing is lost, and everything reads it as before."""
    from shoal.jobs import run_dir
    from shoal.storage.compaction import compact_run, expand_run
    from shoal.terminal import access_reports

    act = expand_run if undo else compact_run
    access_reports.print_compactions([act(run_dir.find(run, runs))], as_json=as_json)


def archive(
    run: RunName,
    to: Annotated[str, typer.Option(help="s3://bucket/runs, file:///mnt/archive", show_default=False)],
    free: Annotated[bool, typer.Option("--free", help="Afterwards move the run here to the trash.")] = False,
    runs: Runs = RUNS,
) -> None:
    """Copy a run to a URL, read it back and compare; `shoal fetch` brings it back."""
    from shoal.errors import plural
    from shoal.jobs import run_dir
    from shoal.storage.archive import archive_run
    from shoal.storage.trash import move_to_trash
    from shoal.terminal import formatting

    paths = run_dir.find(run, runs)
    made = archive_run(paths, to, show=output.print_lines)
    told = f"{plural(len(made.files), 'file')}, {formatting.size(made.size_bytes)}"
    output.print_lines(f"{paths.name} is at {to.rstrip('/')}/{paths.name}: {told}, each read back and compared")
    if free:
        move_to_trash(paths, runs)
        output.print_lines(f"{paths.name} is in the trash; shoal trash --empty frees its bytes")


def fetch(
    url: Annotated[str, typer.Argument(help="Where `shoal archive` put it: URL/RUN.", show_default=False)],
    runs: Runs = RUNS,
) -> None:
    """Bring an archived run back, every file compared by its SHA-256."""
    from shoal.storage.archive import fetch_run

    output.print_lines(f"{fetch_run(url, runs).root} is here, as it was")
