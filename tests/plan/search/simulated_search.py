"""A search against a known function, carried by any number of imaginary workers in any real order."""

import hashlib
import json
import math
import random

from shoal.plan.search.make import make_search
from shoal.plan.search.trial import SearchEnd, ShapeWanted, Stretch, StretchResult, TrialShape, Wait
from shoal.spec.load import make_job

UNITS = 9
SPACE = {
    "optimizer.args.lr": {"low": 1e-5, "high": 0.1},
    "batch_size": [32, 64, 128],
    "optimizer": [{"name": "AdamW", "args": {"weight_decay": {"low": 1e-6, "high": 0.1}}}, {"name": "SGD"}],
}


def job_of(search, **fields):
    base = {
        "model": "torch.nn:Linear",
        "loss": "CrossEntropyLoss",
        "epochs": UNITS,
        "metrics": ["accuracy"],
        "data": {"source": {"kind": "npz", "path": "x.npz"}, "split": {"kind": "holdout", "validation": 0.2}},
    }
    data = {**base, **fields, "search": {"space": SPACE, "metric": "accuracy", "budget": "24 trials", **search}}
    return make_job(data, check_names=False)


def shape_of(changes):
    """Cost and size depend on the values; a few jobs cannot be trained."""
    batch = changes.get("batch_size", 32)
    failure = "out of memory" if changes["optimizer.args.lr"] < 2e-5 else ""
    return TrialShape(UNITS, 1 + 32 / batch, {"parameters": 1000.0 * batch}, failure)


def result_of(stretch):
    """Best at a learning rate of 0.001; very high ones diverge after three units."""
    rate = math.log10(stretch.changes["optimizer.args.lr"])
    seed = stretch.changes.get("seed", 0)
    rows = []
    for unit in range(stretch.start + 1, stretch.end + 1):
        if rate > -1.2 and unit > 3:
            return StretchResult(tuple(rows), "the loss is not finite")
        accuracy = 1 - (rate + 3) ** 2 / 10 - 0.3 / unit + 0.001 * seed
        rows.append({"accuracy": accuracy, "loss": 1 - accuracy + 0.01 * stretch.changes.get("batch_size", 32) / 128})
    return StretchResult(tuple(rows))


def play(job, *, workers=1, chance=None, cuts=(), result=result_of, shape=shape_of):
    """Run a search to its end. `chance` shuffles which stretch ends next; at each of `cuts` decisions a new plan is
    made from the journal of calls. Returns the plan, its decisions and the end."""
    plan, calls, decisions, running = make_search(job), [], [], []
    while True:
        if len(decisions) in cuts:
            cuts = [cut for cut in cuts if cut != len(decisions)]
            plan = replay(job, calls)
        decision = plan.decide()
        if isinstance(decision, ShapeWanted):
            calls.append(("shape", decision.trial, shape(decision.changes)))
            plan.tell_shape(*calls[-1][1:])
        elif isinstance(decision, Stretch) and decision.number < len(decisions):
            assert decision == decisions[decision.number]  # decided before the cut
        elif isinstance(decision, Stretch):
            decisions.append(decision)
            running.append(decision)
        elif isinstance(decision, SearchEnd):
            return plan, decisions, decision
        else:
            assert isinstance(decision, Wait)
            ended = _ended(running, decision, workers, chance)
            running.remove(ended)
            calls.append(("result", ended.number, result(ended)))
            plan.tell(*calls[-1][1:])


def _ended(running, waiting, workers, chance):
    """Which of the stretches that the workers carry ends next; the earliest virtual ends are carried first."""
    carried = sorted(running, key=lambda s: (s.ends, s.number))[:workers]
    assert waiting.number in [s.number for s in carried]
    return chance.choice(carried) if chance else carried[0]


def replay(job, calls):
    """A new plan to which everything is told again, decisions in between."""
    plan = make_search(job)
    told = list(calls)
    while told:
        decision = plan.decide()
        if isinstance(decision, Stretch):
            continue
        kind, number, what = told.pop(0)
        (plan.tell_shape if kind == "shape" else plan.tell)(number, what)
    return plan


def digest(decisions, end):
    rows = [
        [d.number, d.slot, d.trial, dict(d.changes), d.start, d.end, d.begins, d.ends, d.copy_of] for d in decisions
    ]
    return hashlib.sha256(json.dumps([rows, end.best, end.why]).encode()).hexdigest()


def played_digest(job, **how):
    _, decisions, end = play(job, **how)
    return digest(decisions, end)


def seeded(number):
    return random.Random(number)
