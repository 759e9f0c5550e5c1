"""The end of a command: prints the receipt, the error, or how to resume, and gives the exit code."""

from __future__ import annotations

from rich.console import Console

from shoal.jobs.run_result import RunResult
from shoal.terminal import reports
from shoal.terminal.console import json_line


def print_result(result: RunResult, console: Console, errors: Console, *, as_json: bool) -> int:
    """Print the result. Returns the exit code."""
    last = result.deciding
    if last.error is not None:
        reports.print_error(errors, last.error)
        if last.traceback:
            errors.print(last.traceback, soft_wrap=True)
    elif last.status != "finished":
        name = last.paths.parent_run.name
        saved = "nothing was saved yet" if last.saved_step is None else f"saved at step {last.saved_step}"
        errors.print(f"{last.status}; {saved}. Continue with: shoal resume {name}", soft_wrap=True)
    elif as_json:
        print(json_line({"kind": "receipt", **result.receipt_data()}))
    elif result.children:
        reports.print_folds(console, result.receipts)
    else:
        reports.print_receipt(console, result.receipts[0])
        console.print(f"model: {last.paths.model}", soft_wrap=True)
    return result.exit_code
