"""One seed, one history: a run, and the faults that happen to it. A failure is shrunk to the faults that it needs."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from shoal.fleet.messages import parse_user_request
from tests.simulation.agents import SimulatedAgent
from tests.simulation.run import DriverProcess, SimulatedRun
from tests.simulation.standins import happening
from tests.simulation.worker import SimulatedWorker
from tests.simulation.world import START_S, InvariantViolation, Process, require

CALM_S = 500.0
"""Virtual seconds in which a run must finish after the last fault."""
MAX_WORKERS = 7
LONGEST_TRACE = 80


@dataclass(frozen=True)
class Fault:
    """`which` and `other`, from 0 to 1, choose whom it befalls among those that are there then."""

    at_s: float
    kind: str
    which: float
    other: float
    duration_s: float

    def __str__(self) -> str:
        return f"{self.at_s:.3f} s: {self.kind} (which {self.which:.3f}, {self.duration_s:.2f} s)"


@dataclass(frozen=True)
class History:
    seed: int
    workers: int
    lanes: int
    steps: int
    save_every: int
    faults: tuple[Fault, ...]

    @property
    def calm_from_s(self) -> float:
        return max((fault.at_s + 3 * fault.duration_s for fault in self.faults), default=0.0)

    def without(self, index: int) -> History:
        return replace(self, faults=self.faults[:index] + self.faults[index + 1 :])


def make_history(seed: int) -> History:
    rng = random.Random(seed)
    faults = []
    at_s = 1.2 * rng.random()
    for _ in range(rng.choice((0, 1, 1, 2, 2, 3, 4, 6))):
        kind = rng.choice(tuple(FAULTS))
        faults.append(
            Fault(at_s, kind, rng.random(), rng.random(), rng.choice((0.1, 0.6, 1.5, 3.0, 7.0)) * rng.random())
        )
        at_s += rng.expovariate(1.0) * rng.choice((0.02, 0.3, 1.5))
    lanes = rng.randint(1, 4)
    return History(
        seed,
        workers=rng.randint(1, min(3, lanes)),
        lanes=lanes,
        steps=rng.randint(3, 9),
        save_every=rng.randint(1, 4),
        faults=tuple(faults),
    )


def run_history(history: History) -> SimulatedRun:
    """Let it happen. Raises InvariantViolation, or what the real code raised, with the run as `failure.run`."""
    run = SimulatedRun(
        history.seed,
        workers=history.workers,
        lanes=history.lanes,
        steps=history.steps,
        save_every=history.save_every,
    )
    with happening(run):
        try:
            for fault in history.faults:
                run.world.at(fault.at_s, _inject, run, fault)
            run.new_driver()
            until_s = START_S + history.calm_from_s + CALM_S
            require(run.world.run(until_s=until_s, done=lambda: run.finished), "it does not end")
            run.check_end()
            require(run.world.run(until_s=until_s + CALM_S, done=lambda: run.machines_are_free), "an agent never ends")
            run.check_agents()
        except BaseException as failure:
            failure.run = run  # type: ignore[attr-defined]
            raise
        finally:
            run.world.close()
    return run


def fails(history: History) -> BaseException | None:
    try:
        run_history(history)
    except (Exception, InvariantViolation) as failure:
        return failure
    return None


def shrink(history: History) -> History:
    """Leave out faults, one after the other, as long as the history still fails."""
    index = 0
    while index < len(history.faults):
        fewer = history.without(index)
        if fails(fewer) is not None:
            history = fewer
        else:
            index += 1
    return history


def describe_failure(history: History) -> str:
    """What failed, the faults that it needs, and the trace."""
    shrunk = shrink(history)
    failure = fails(shrunk)
    assert failure is not None
    lines = [
        f"seed {history.seed}: {type(failure).__name__}: {failure}",
        f"{shrunk.workers} workers, {shrunk.lanes} lanes, {shrunk.steps} steps, a save every {shrunk.save_every}",
        f"{len(shrunk.faults)} of {len(history.faults)} faults are needed:",
        *(f"  {fault}" for fault in shrunk.faults),
        "the trace:",
        *format_trace(failure.run)[-LONGEST_TRACE:],  # type: ignore[attr-defined]
        f"python -m tests.simulation {history.seed} --trace repeats it",
    ]
    return "\n".join(lines)


def format_trace(run: SimulatedRun) -> list[str]:
    return [
        f"{at_s:9.3f} {what} {detail if detail is not None else ''}".rstrip() for at_s, what, detail in run.world.trace
    ]


# ---- faults ----


def _inject(run: SimulatedRun, fault: Fault) -> None:
    run.world.log(f"FAULT {fault.kind}", f"{fault.duration_s:.2f} s")
    if not run.finished:
        FAULTS[fault.kind](run, fault)


def _chosen(run: SimulatedRun, fault: Fault) -> SimulatedWorker | None:
    alive = run.alive_workers()
    return alive[int(fault.which * len(alive))] if alive else None


def _living_driver(run: SimulatedRun) -> DriverProcess | None:
    return run.driver if run.driver is not None and run.driver.alive else None


def kill(run: SimulatedRun, fault: Fault) -> None:
    if worker := _chosen(run, fault):
        worker.kill()


def kill_all(run: SimulatedRun, fault: Fault) -> None:
    for worker in run.alive_workers():
        worker.kill()


def freeze(run: SimulatedRun, fault: Fault) -> None:
    if worker := _chosen(run, fault):
        _freeze(run, worker, fault.duration_s)


def freeze_for_good(run: SimulatedRun, fault: Fault) -> None:
    if worker := _chosen(run, fault):
        run.impaired.add(worker)
        worker.freeze()


def freeze_driver(run: SimulatedRun, fault: Fault) -> None:
    if driver := _living_driver(run):
        _freeze(run, driver, fault.duration_s)


def _freeze(run: SimulatedRun, process: Process, duration_s: float) -> None:
    run.impaired.add(process)
    process.freeze()
    run.world.at(duration_s, process.thaw)


def cut_one_way(run: SimulatedRun, fault: Fault) -> None:
    if pair := _pair(run, fault):
        _cut(run, [pair], fault.duration_s)


def cut(run: SimulatedRun, fault: Fault) -> None:
    if pair := _pair(run, fault):
        _cut(run, [pair, pair[::-1]], fault.duration_s)


def isolate(run: SimulatedRun, fault: Fault) -> None:
    """Nobody reaches this process, or it reaches nobody, or both."""
    everybody = _everybody(run)
    if len(everybody) > 1:
        one = everybody[int(fault.which * len(everybody))]
        others = [other for other in everybody if other is not one]
        ways = [(one, other) for other in others if fault.other < 0.7] + [
            (other, one) for other in others if fault.other > 0.3
        ]
        _cut(run, ways, fault.duration_s)


def _everybody(run: SimulatedRun) -> list[Process]:
    driver = _living_driver(run)
    return [*([driver] if driver else []), *run.alive_workers(), *run.alive_agents()]


def _pair(run: SimulatedRun, fault: Fault) -> tuple[Process, Process] | None:
    everybody = _everybody(run)
    if len(everybody) < 2:
        return None
    one = everybody.pop(int(fault.which * len(everybody)))
    return one, everybody[int(fault.other * len(everybody))]


def _cut(run: SimulatedRun, ways: Iterable[tuple[Process, Process]], duration_s: float) -> None:
    ways = list(ways)
    run.network.cut.update(ways)
    run.impaired.update(process for way in ways for process in way)
    run.world.log("cut", [(one.name, other.name) for one, other in ways])
    run.world.at(duration_s, run.network.heal, ways)


def break_connection(run: SimulatedRun, fault: Fault) -> None:
    if driver := _living_driver(run):
        driver.control.break_link(lambda links: links[int(fault.which * len(links))])


def half_open(run: SimulatedRun, fault: Fault) -> None:
    """A client loses its connection and connects again. The driver still has the old connection for a while: what was
    sent on it comes late, and the last message comes again on the new one."""
    if driver := _living_driver(run):
        driver.control.leave_half_open(lambda links: links[int(fault.which * len(links))], fault.duration_s)


def duplicate(run: SimulatedRun, fault: Fault) -> None:
    """Messages come twice for a while."""
    run.network.duplicates = 0.3
    run.world.at(fault.duration_s, setattr, run.network, "duplicates", 0.0)


def slow_down(run: SimulatedRun, fault: Fault) -> None:
    """Messages are late for a while."""
    run.world.slowness, run.was_slow = 100.0, True
    run.world.at(fault.duration_s, setattr, run.world, "slowness", 1.0)


def join(run: SimulatedRun, fault: Fault) -> None:
    if len(run.alive_workers()) < MAX_WORKERS:
        run.join()


def terminate(run: SimulatedRun, fault: Fault) -> None:
    if worker := _chosen(run, fault):
        worker.session.leaving = True


def join_machine(run: SimulatedRun, fault: Fault) -> None:
    """Somebody runs `shoal join` on another machine, with one worker or two."""
    if len(run.alive_workers()) + 2 <= MAX_WORKERS:
        run.join_machine(1 + int(2 * fault.which))


def _chosen_agent(run: SimulatedRun, fault: Fault) -> SimulatedAgent | None:
    """A living agent. If there is none, a machine joins: later faults may befall it."""
    alive = run.alive_agents()
    if not alive:
        join_machine(run, fault)
        return None
    return alive[int(fault.which * len(alive))]


def crash_agent(run: SimulatedRun, fault: Fault) -> None:
    """The agent dies, and its workers with it."""
    if agent := _chosen_agent(run, fault):
        agent.kill()


def crash_machine(run: SimulatedRun, fault: Fault) -> None:
    """A whole machine is gone. It joins again later, or never."""
    if agent := _chosen_agent(run, fault):
        agent.kill()
        if fault.other < 0.7:
            run.world.at(fault.duration_s, join_machine, run, fault)


def freeze_agent(run: SimulatedRun, fault: Fault) -> None:
    if agent := _chosen_agent(run, fault):
        _freeze(run, agent, fault.duration_s)


def kill_worker_of_agent(run: SimulatedRun, fault: Fault) -> None:
    agent = _chosen_agent(run, fault)
    if agent and (alive := [worker for worker in agent.workers if worker.alive]):
        alive[int(fault.other * len(alive))].kill()


def interrupt_agent(run: SimulatedRun, fault: Fault) -> None:
    """Ctrl-C in the terminal of `shoal join`."""
    if agent := _chosen_agent(run, fault):
        agent.asked.append("interrupted")


def isolate_machine(run: SimulatedRun, fault: Fault) -> None:
    """An agent and its workers reach each other only."""
    if agent := _chosen_agent(run, fault):
        outside = [process for process in _everybody(run) if process not in agent.machine]
        pairs = [(one, other) for one in agent.machine if one.alive for other in outside]
        _cut(run, [*pairs, *(pair[::-1] for pair in pairs)], fault.duration_s)


def crash_driver(run: SimulatedRun, fault: Fault) -> None:
    if driver := _living_driver(run):
        driver.crash()
        run.world.at(3 * fault.duration_s, run.new_driver)  # sometimes longer than workers are patient


def scale(run: SimulatedRun, fault: Fault) -> None:
    _command(run, "scale", wanted=1 + int(4 * fault.which))


def drain(run: SimulatedRun, fault: Fault) -> None:
    driver = _living_driver(run)
    if driver and driver.driver and (seats := sorted(driver.driver.worker_group.membership.members)):
        _command(run, "drain", seat=seats[int(fault.which * len(seats))])


def stop(run: SimulatedRun, fault: Fault) -> None:
    """The user stops the run, and resumes it later."""
    driver = _living_driver(run)
    if driver and driver.driver and not driver.frozen:
        driver.driver.stop("stopped")


def _command(run: SimulatedRun, kind: str, **fields: int) -> None:
    driver = _living_driver(run)
    if driver and driver.driver and not driver.frozen:
        driver.driver.commands.handle(parse_user_request(kind, fields))


FAULTS: dict[str, Callable[[SimulatedRun, Fault], None]] = {
    one.__name__: one
    for one in (
        kill,
        kill_all,
        freeze,
        freeze_for_good,
        freeze_driver,
        cut_one_way,
        cut,
        isolate,
        break_connection,
        duplicate,
        slow_down,
        join,
        terminate,
        crash_driver,
        scale,
        drain,
        stop,
        half_open,
        join_machine,
        crash_agent,
        crash_machine,
        freeze_agent,
        kill_worker_of_agent,
        interrupt_agent,
        isolate_machine,
    )
}
