"""The verbs about what runs leave on disk: du, gc, trash, tag, export."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from shoal.cli.options import RUNS, AsJson, Runs

DAY_S = 86400.0
PANEL = "Disk"


def register(app: typer.Typer) -> None:
    for verb in (du, gc, trash):
        app.command(rich_help_panel=PANEL)(verb)


def du(runs: Runs = RUNS, as_json: AsJson = False) -> None:
    """What each run occupies on disk, and what deleting it would free."""
    from shoal.storage.disk_usage import all_usage
    from shoal.terminal import access_reports

    access_reports.print_usage(all_usage(runs), as_json=as_json)


def gc(
    older: Annotated[float, typer.Option("--older", min=0, help="Only runs unchanged for so many days.")] = 30,
    keep: Annotated[int, typer.Option(min=0, help="Keep the newest runs of each job.")] = 2,
    status: Annotated[str, typer.Option(help="Only these: failed,stopped", show_default=False)] = "",
    checkpoints: Annotated[
        bool, typer.Option("--checkpoints", help="Only the checkpoints of finished runs with a model.")
    ] = False,
    apply: Annotated[str, typer.Option(help="Apply the plan with this hash.", show_default=False)] = "",
    runs: Runs = RUNS,
    as_json: AsJson = False,
) -> None:
    """Clean up: shows a plan and its hash; --apply HASH moves exactly that to the trash."""
    from shoal.storage import cleanup
    from shoal.terminal import access_reports

    if apply:
        entries, stays = cleanup.apply_plan(runs, apply)
        access_reports.print_trash(entries, as_json=as_json)
        for line in stays:
            print(line, file=sys.stderr)
        return
    chosen = tuple(one for one in status.split(",") if one)
    rules = cleanup.CleanupRules(older * DAY_S, keep, chosen, checkpoints)
    items = cleanup.make_plan(runs, rules)
    access_reports.print_plan(items, cleanup.save_plan(runs, items) if items else "", as_json=as_json)


def trash(
    delete: Annotated[str, typer.Option(help="Move this run to the trash.", show_default=False)] = "",
    part: Annotated[str, typer.Option(help="With --delete: only its checkpoints.", show_default=False)] = "",
    restore: Annotated[str, typer.Option(help="Put a run back.", show_default=False)] = "",
    empty: Annotated[bool, typer.Option("--empty", help="Delete for good.")] = False,
    days: Annotated[float, typer.Option(min=0, help="With --empty: only what is older.")] = 0,
    runs: Runs = RUNS,
    as_json: AsJson = False,
) -> None:
    """Deleted runs: list them, delete one, put one back, or free their bytes."""
    from shoal.jobs import run_dir
    from shoal.storage import trash as bin_
    from shoal.terminal import access_reports

    if delete:
        access_reports.print_trash([bin_.move_to_trash(run_dir.find(delete, runs), runs, part=part)], as_json=as_json)
    elif restore:
        print(f"{bin_.restore(runs, restore).fields['run']} is back", file=sys.stderr)
    elif empty:
        access_reports.print_trash(bin_.empty_trash(runs, older_than_s=days * DAY_S), as_json=as_json)
    else:
        access_reports.print_trash(bin_.list_trash(runs), as_json=as_json)
