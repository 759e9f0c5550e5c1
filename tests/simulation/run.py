"""A simulated run: a real `RunDriver` and its workers in a world of their own, and what must always hold."""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace
from typing import Any

from shoal.fleet.engine import Launch
from shoal.jobs.run_driver import RunDriver
from shoal.jobs.run_result import RunResult
from shoal.spec.job import Job
from shoal.spec.load import make_job
from shoal.spec.view import Address, View, step_of
from tests.conftest import FIXTURES, MLP
from tests.simulation.agents import Directories, SimulatedAgent, check_exit_notes
from tests.simulation.machine import Disk, EventLog, Machine, SimulatedEngine
from tests.simulation.network import Network, SimulatedControlServer
from tests.simulation.standins import SaveLock
from tests.simulation.worker import PATHS, SimulatedWorker, undisturbed_chain
from tests.simulation.world import Process, World, require

TICK_S = 0.25
SOON_S = 0.01
RESUME_S = 1.0
LEASE_S = 10.0
"""Seconds after its eviction in which a worker that nobody can kill must have stopped."""


@cache
def make_simulated_job(workers: int, lanes: int, steps: int, save_every: int) -> Job:
    return make_job(
        MLP
        | {
            "workers": workers,
            "lanes": lanes,
            "steps": steps,
            "batch_size": 24,
            "checkpoint": {"every": f"{save_every} steps"},
            "elastic": {"patience_s": 8.0, "restarts": 2},
        },
        base_dir=str(FIXTURES),
    )


class DriverProcess(Process):
    """A process with a real driver. `result` is set when the run has ended."""

    def __init__(self, run: SimulatedRun, number: int) -> None:
        super().__init__(run.world, f"driver-{number}")
        self._run = run
        self._soon = False
        self.result: RunResult | None = None
        self.engine = SimulatedEngine(run.machine, self.poke)
        self.control = SimulatedControlServer(run.network, self, self.poke, may_refuse=run.is_mistaken_for_another)
        self.driver: RunDriver | None = None

    def begin(self) -> None:
        self.driver = RunDriver(self._run.job, PATHS, SimpleNamespace(environment={}))  # type: ignore[arg-type]
        self.driver.start()
        self._run.watch_views(self.driver)
        self._tick()

    def _tick(self) -> None:
        if self.result is None:
            self.at(TICK_S, self._tick)
            self.act()

    def poke(self) -> None:
        """Something is readable."""
        if not self._soon and self.alive:
            self._soon = True
            self.at(SOON_S, self._act_soon)

    def _act_soon(self) -> None:
        self._soon = False
        self.act()

    def act(self) -> None:
        if self.driver is not None and self.result is None:
            self.result = self.driver.tick()
            if self.result is not None:
                self._run.on_result(self, self.result)

    def crash(self) -> None:
        """The process is gone; what it started goes on."""
        self.control.close()
        self.alive = False


class SimulatedRun:
    """Everything of one run. The invariants are checked where they could break."""

    def __init__(self, seed: int, *, workers: int, lanes: int, steps: int, save_every: int) -> None:
        self.job = make_simulated_job(workers, lanes, steps, save_every)
        self.job_sha256 = "0" * 64
        self.lanes, self.steps, self.evaluate_every = lanes, steps, max(steps // 2, 1)
        self.lane_s = 0.1 / lanes
        self.world = World(seed)
        self.network = Network(self.world)
        self.log = EventLog(self.world)
        self.machine = Machine(self._launch, self.log)
        self.chain = undisturbed_chain(steps, lanes)
        self.disk = Disk(self.world)
        self.save_lock = SaveLock()
        self.workers: list[SimulatedWorker] = []
        self.agents: list[SimulatedAgent] = []
        self.directories = Directories()
        self.driver: DriverProcess | None = None
        self.results: list[RunResult] = []
        self.followers: set[int] = set()  # seats that have followed, and have not been in a training view since
        self.impaired: set[Process] = set()
        """Processes that were frozen or cut off."""
        self.was_slow = False
        self.views: dict[int, View] = {}
        self._drivers = 0

    # ---- parts ----

    def new_driver(self) -> None:
        """Start the run, or resume it."""
        if self.driver is None or not self.driver.alive:
            self._drivers += 1
            self.world.log("driver starts", self._drivers)
            self.driver = DriverProcess(self, self._drivers)
            self.driver.begin()

    def new_engine(self) -> SimulatedEngine:
        assert self.driver is not None
        return self.driver.engine

    def new_control(self) -> SimulatedControlServer:
        assert self.driver is not None
        return self.driver.control

    def driver_address(self) -> Any:
        return self.driver.control if self.driver is not None else None

    def _launch(self, launch: Launch) -> SimulatedWorker:
        return self._new_worker(launch.seat.number)

    def join(self) -> SimulatedWorker:
        return self._new_worker(None)

    def join_machine(self, workers: int) -> None:
        """Somebody runs `shoal join` on another machine."""
        self.agents.append(SimulatedAgent(self, len(self.agents), workers=workers))
        self.world.log(f"{self.agents[-1].name} starts", workers)

    def fork(self, agent: SimulatedAgent, secret: str, *, output: str, own_events: str) -> SimulatedWorker:
        worker = self._new_worker(None, agent=secret, output=output, own_events=own_events)
        agent.workers.append(worker)
        return worker

    def _new_worker(self, seat: int | None, **agent: str) -> SimulatedWorker:
        worker = SimulatedWorker(self, len(self.workers), seat=seat, **agent)
        self.workers.append(worker)
        self.world.log(f"{worker.name} starts", seat)
        return worker

    def worker_at(self, address: Address) -> SimulatedWorker:
        return self.workers[address.port]

    def alive_workers(self) -> list[SimulatedWorker]:
        return [worker for worker in self.workers if worker.alive]

    def alive_agents(self) -> list[SimulatedAgent]:
        return [agent for agent in self.agents if agent.alive]

    @property
    def machines_are_free(self) -> bool:
        """Whether every `shoal join` has returned, except those that wait for a frozen process."""
        return all(agent.is_stuck for agent in self.alive_agents())

    def wake_all(self) -> None:
        for worker in self.workers:
            if worker.alive:
                worker.wake()

    # ---- what happens ----

    def on_worker_end(self, worker: SimulatedWorker) -> None:
        self.world.at(0.0, self.wake_all)

    def on_result(self, driver: DriverProcess, result: RunResult) -> None:
        self.world.log("driver ends", result.status)
        driver.alive = False
        self.results.append(result)
        if result.status != "finished":
            self.world.at(RESUME_S, self.new_driver)

    @property
    def finished(self) -> bool:
        return bool(self.results) and self.results[-1].status == "finished"

    def watch_views(self, driver: RunDriver) -> None:
        """Check every view that the driver publishes."""
        group = driver.worker_group
        publish = group._publish

        def checked(action: Any) -> None:
            self.check_view(group, action.view)
            publish(action)

        group._publish = checked  # type: ignore[method-assign]

    # ---- invariants ----

    def check_view(self, group: Any, view: View) -> None:
        self.world.log("view", view)
        self.followers |= set(view.followers)
        if not view.carries:
            return
        dealt = sorted(lane for mine in view.carries.values() for lane in mine)
        require(dealt == list(range(self.lanes)), f"view {view.number} does not deal each lane once")
        members = {seat: self.worker_at(member.address) for seat, member in group.membership.members.items()}
        for seat, worker in members.items():
            # A follower may be further than it last said. It does not enter this view then, and says where it stands.
            if worker.alive and not group.roster.is_evicted(seat) and seat not in self.followers:
                require((worker.position or 0) <= view.position, f"view {view.number} loses steps of {worker.name}")
        self.followers -= set(view.carries)
        known = set(members.values())
        elsewhere = [one for one in self.workers if one.exit_code or (one.alive and one not in known)]
        # died with them, or has not found this driver yet and brings them back
        kept = max([step_of(view.position), *(one.progress.step for one in elsewhere if one.progress is not None)])
        for worker in self.workers:
            if worker.managed and worker.exit_code == 0 and worker.progress is not None:
                require(
                    worker.progress.step <= kept, f"{worker.name} has left with steps that view {view.number} lacks"
                )
        source = members.get(-1 if view.source is None else view.source)
        held = source is None or not source.alive or (source.position or 0) >= view.position
        require(held, f"the source of view {view.number} does not hold its position")

    def is_mistaken_for_another(self, why: str) -> bool:
        """A worker that joined without an event in the stream, and one of a later driver, may get the same seat. Then
        the later driver refuses what the agent of the first reports."""
        names = [f"worker-{seat}" for worker in self.workers for seat in set(worker.seats)]
        names += [f"worker-{worker.session.seat}" for worker in self.workers if worker.managed and not worker.seats]
        return any(names.count(name) > 1 and f"it reports {name}, which it did not start" == why for name in names)

    def check_weights(self, worker: SimulatedWorker, step: int, link: int) -> None:
        """A worker has applied a step: its own commit, or one that it follows."""
        require(link == self.chain[step + 1], f"{worker.name} has other weights after step {step}")

    def check_commit(self, worker: SimulatedWorker, view: View) -> None:
        """A worker commits a step with the others of this view."""
        leaders = [one.name for one in self.alive_workers() if one.group.view is not None and one.leads_in(view.number)]
        require(len(leaders) <= 1, f"{leaders} save in view {view.number}")
        evicted_s = self.world.now_s - self.log.evicted_at_s.get(f"worker-{worker.group.seat}", self.world.now_s)
        require(evicted_s <= LEASE_S, f"{worker.name} trains {evicted_s:.1f} s after its eviction")

    def check_end(self) -> None:
        """After the run has finished."""
        result = self.results[-1]
        receipt = result.receipt
        assert receipt is not None
        require(receipt.weights_sha256 == f"{self.chain[-1]:064x}", "the receipt has other weights")
        require(receipt.steps == self.steps, f"the receipt has {receipt.steps} of {self.steps} steps")
        require(receipt.exact is not False, "the receipt says that the run is not exact")
        # others may wait for one that is frozen or cut off, also on another machine
        excused = self.was_slow or self.impaired & {*self.machine.killed_at_end, *self.alive_workers()}
        killed = [] if excused else [one.name for one in self.machine.killed_at_end]
        require(not killed, f"{killed} did not hear that the run has finished")
        managed = self.machine.deaths
        most = managed + sum(worker.control.connections for worker in self.workers if not worker.managed)
        require(
            managed <= receipt.deaths_survived <= most,
            f"the receipt has {receipt.deaths_survived} deaths, and there were {managed}",
        )
        require(self.disk.complete_steps()[:1] == [self.steps], "the last step is not on disk")

    def check_agents(self) -> None:
        """After the agents have returned."""
        for agent in self.agents:
            agent.check_output(PATHS, disturbed=self._drivers > 1 or self.network.has_duplicated)
        check_exit_notes(self.log.events, self.workers)
