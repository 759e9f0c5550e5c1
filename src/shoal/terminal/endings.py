"""How a run ended: its receipt, its error, or how to go on; and the exit code that says so."""

from __future__ import annotations

import json

from rich.console import Console

from shoal.jobs.drive import Summary, merged
from shoal.jobs.run import Outcome, exit_code
from shoal.spec.receipt import Receipt
from shoal.terminal import reports


def tell(outcome: Outcome | Summary, console: Console, errors: Console, *, as_json: bool) -> int:
    """Returns the exit code."""
    last = _last(outcome)
    if last.error is not None:
        reports.failure(errors, last.error)
        if last.traceback:
            errors.print(last.traceback, highlight=False, markup=False, soft_wrap=True)
    elif last.status != "finished":
        name = last.paths.whole.name
        saved = "nothing was saved yet" if last.saved_step is None else f"saved at step {last.saved_step}"
        errors.print(f"{last.status}; {saved}. Go on with: shoal resume {name}", highlight=False)
    elif as_json:
        content = merged(outcome) if isinstance(outcome, Summary) else _receipt(outcome).model_dump(mode="json")
        print(json.dumps({"kind": "receipt", **content}))
    elif isinstance(outcome, Summary):
        reports.folds(console, [_receipt(one) for one in outcome.folds])
    else:
        reports.receipt(console, _receipt(outcome))
        console.print(f"model: {last.paths.model}", highlight=False, soft_wrap=True)
    return exit_code(last)


def _last(outcome: Outcome | Summary) -> Outcome:
    """Of several folds the first that did not finish, or else the last."""
    if isinstance(outcome, Summary):
        return next((one for one in outcome.folds if one.status != "finished"), outcome.folds[-1])
    return outcome


def _receipt(outcome: Outcome) -> Receipt:
    assert outcome.receipt is not None
    return outcome.receipt
