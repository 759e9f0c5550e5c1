"""How a run ended: its receipt, its error, or how to go on; and the exit code that says so."""

from __future__ import annotations

import json

from rich.console import Console

from shoal.jobs.executor import FoldsResult, folds_receipt
from shoal.jobs.run_driver import RunResult, exit_code
from shoal.spec.receipt import Receipt
from shoal.terminal import reports


def print_result(result: RunResult | FoldsResult, console: Console, errors: Console, *, as_json: bool) -> int:
    """Returns the exit code."""
    last = _deciding_result(result)
    if last.error is not None:
        reports.print_error(errors, last.error)
        if last.traceback:
            errors.print(last.traceback, highlight=False, markup=False, soft_wrap=True)
    elif last.status != "finished":
        name = last.paths.parent_run.name
        saved = "nothing was saved yet" if last.saved_step is None else f"saved at step {last.saved_step}"
        errors.print(f"{last.status}; {saved}. Go on with: shoal resume {name}", highlight=False)
    elif as_json:
        content = (
            folds_receipt(result) if isinstance(result, FoldsResult) else _receipt_of(result).model_dump(mode="json")
        )
        print(json.dumps({"kind": "receipt", **content}))
    elif isinstance(result, FoldsResult):
        reports.print_folds(console, [_receipt_of(one) for one in result.folds])
    else:
        reports.print_receipt(console, _receipt_of(result))
        console.print(f"model: {last.paths.model}", highlight=False, soft_wrap=True)
    return exit_code(last)


def _deciding_result(result: RunResult | FoldsResult) -> RunResult:
    """Of several folds the first that did not finish, or else the last."""
    if isinstance(result, FoldsResult):
        return next((one for one in result.folds if one.status != "finished"), result.folds[-1])
    return result


def _receipt_of(result: RunResult) -> Receipt:
    assert result.receipt is not None
    return result.receipt
