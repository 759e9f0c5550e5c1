"""Hundreds of random plans of faults, from inside the workers and from outside: the same bits after each."""

import contextlib
import os
import random
import signal
import threading
import time

import pytest

from shoal.errors import ShoalError
from shoal.jobs import commands
from tests.conftest import CNN, GPT, MLP
from tests.jobs.fault_injection import assert_nothing_left, assert_same, fault_script, reference_receipt, time_limit

PLANS = 220
TESTED = {"split": {"kind": "holdout", "validation": 0.2, "test": 0.1}}
JOBS = {
    "mlp": MLP | {"steps": 120, "data": MLP["data"] | TESTED},
    "cnn": CNN | {"steps": 50, "data": CNN["data"] | TESTED},
    "gpt": GPT | {"steps": 40, "data": GPT["data"] | TESTED},
}
STEPWISE = ("in data", "in compute", "in exchange", "in telling", "in evaluation", "while applying")
PLACES = (
    *STEPWISE, "while joining", "while catching up", "while source", "while feeding", "in following", "in save",
    "in export",
)  # fmt: skip


class RandomFaultPlan:
    """What a seed stands for."""

    def __init__(self, seed):
        rng = random.Random(seed)
        self.rng = rng
        name = rng.choice(list(JOBS))
        lanes = rng.randint(3, 9)
        self.workers = rng.randint(2, min(lanes, 6))
        self.job = JOBS[name] | {
            "lanes": lanes,
            "evaluate": {"every_steps": rng.choice([7, 20]), "batch_size": 16},
        }
        self.checkpoint = {"every": rng.choice(["never", "3 steps", "20 steps"])}
        self.worker_faults = [self._random_worker_fault() for _ in range(rng.randint(0, 4))]
        self.driver_faults = [
            (rng.choice([0.0, 0.02, 0.2, 0.6]), self._random_driver_fault()) for _ in range(rng.randint(0, 5))
        ]

    def _random_worker_fault(self):
        rng = self.rng
        act = rng.choices(["kill", "terminate", "freeze", "hang"], [12, 2, 1, 1])[0]
        if act in ("freeze", "hang"):  # not in a first unit, which may take minutes
            worker, step = rng.randrange(self.workers), rng.randint(5, self.job["steps"] - 1)
            return f"{act} worker {worker} at step {step} in {rng.choice(['compute', 'data'])}"
        where = rng.choice(PLACES)
        step = f" at step {rng.randint(0, self.job['steps'])}" if where in STEPWISE and rng.random() < 0.8 else ""
        after = f" after {rng.choice([1, 3, 10])} ms" if act == "kill" and rng.random() < 0.5 else ""
        return f"{act} worker {rng.randint(0, self.workers + 1)}{step} {where}{after}"

    def _random_driver_fault(self):
        return self.rng.choices(["kill", "terminate", "freeze", "wink", "scale"], [6, 3, 1, 2, 3])[0]

    def __str__(self):
        sizes = f"{self.job['name']}, {self.workers} workers, {self.job['lanes']} lanes"
        return f"{sizes}, {self.worker_faults}, {self.driver_faults}"


class DriverSideFaults:
    """Carries out a plan's acts, one after the other, when their time has come and there is somebody to hit."""

    def __init__(self, plan):
        self.plan = plan
        self.acts = list(plan.driver_faults)
        self.at = None

    def on_event(self, paths, event, run_state):
        if event.kind != "step" or not self.acts or run_state.result:
            return
        now = time.monotonic()
        self.at = self.at or now + self.acts[0][0]
        if now < self.at:
            return
        _, act = self.acts.pop(0)
        self.at = None
        if act == "scale":
            number = self.plan.rng.randint(1, 6)
            threading.Thread(target=self.scale, args=(paths, number), daemon=True).start()
        elif run_state.training_workers:
            self.hit(act, self.plan.rng.choice(run_state.training_workers).pid)

    def scale(self, paths, number):
        with contextlib.suppress(ShoalError):  # the run may be over
            commands.scale(paths, number)

    def hit(self, act, pid):
        with contextlib.suppress(ProcessLookupError):
            if act == "wink":
                os.kill(pid, signal.SIGSTOP)
                threading.Timer(self.plan.rng.choice([0.05, 0.4, 1.5, 3.0]), self.hit, ["wake", pid]).start()
            else:
                signals = {"kill": signal.SIGKILL, "freeze": signal.SIGSTOP, "terminate": signal.SIGTERM}
                os.kill(pid, signals.get(act, signal.SIGCONT))


@pytest.mark.long
@pytest.mark.parametrize("seed", range(PLANS))
def test_random_plans_change_nothing(seed, run, job_dir):
    plan = RandomFaultPlan(seed)
    undisturbed = reference_receipt(run, plan.job)
    outside = DriverSideFaults(plan)
    print(f"seed {seed}: {plan}")
    with time_limit(120):
        outcome = run(
            plan.job, look=outside.on_event, workers=plan.workers, watchers=fault_script(job_dir, *plan.worker_faults),
            elastic={"restarts": 20}, checkpoint=plan.checkpoint,
        )  # fmt: skip
    assert_same(outcome, undisturbed)
    assert_nothing_left(outcome)
