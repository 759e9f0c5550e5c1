"""A queue with daemons that divide a cluster by a policy, as the real one does, on a clock of its own."""

from collections import Counter
from dataclasses import dataclass, field

from shoal.plan.queueing import order, transitions
from shoal.plan.queueing.elastic_shares import ElasticShares
from shoal.plan.queueing.entry import QueueEntry
from shoal.plan.queueing.shares import CoreCapacity, JobFacts, exceeds

TICK_S = 10.0


@dataclass
class SimulatedQueue:
    """`left_s` is the work of each job with one worker. What a daemon knows besides the entries is lost with it."""

    cluster: CoreCapacity
    make_policy: type = ElasticShares
    entries: dict[int, QueueEntry] = field(default_factory=dict)
    left_s: dict[int, float] = field(default_factory=dict)
    started_s: dict[int, float] = field(default_factory=dict)
    now_s: float = 0.0
    epoch: int = 0
    change: int = 0

    def __post_init__(self):
        self.start_daemon()

    def start_daemon(self):
        self.policy, self.seen_s, self.began_s = self.make_policy(), {}, {}
        self.epoch += 1
        for entry in self.running():
            self.put(transitions.lose_driver(entry, new_epoch=self.epoch))

    def end_daemon(self):
        for entry in self.running():
            self.put(transitions.put_back(entry, epoch=self.epoch, why="ended"))

    def put(self, entry):
        self.change += 1
        self.entries[entry.id] = entry.model_copy(update={"change": self.change})

    def submit(self, work_s, **fields):
        number = len(self.entries) + 1
        self.left_s[number] = work_s
        self.put(QueueEntry(id=number, **fields))
        return number

    def running(self):
        return [entry for entry in self.entries.values() if entry.state == "running"]

    def is_young(self, entry):
        return self.now_s - self.began_s[entry.id] < TICK_S

    def facts(self, entry):
        turn_s = self.now_s - self.began_s[entry.id] if entry.state == "running" else 0.0
        seen_s = self.seen_s.setdefault(entry.id, self.now_s)
        return JobFacts(seen_s, turn_s, turn_s, speeds={1: 1.0, 2: 1.6}, remaining=self.left_s[entry.id])

    def decide(self):
        running, ready = self.running(), order.runnable(self.entries)
        found = order.window(ready, self.cluster)
        facts = {entry.id: self.facts(entry) for entry in [*running, *found.entries]}
        shares = self.policy.divide(self.now_s, running, found.entries, cluster=self.cluster, facts=facts)
        self.check(running, found, shares)
        for entry in running:
            if not shares[entry.id].workers:
                self.put(transitions.put_back(entry, epoch=self.epoch, why="others had to go first"))
            else:
                self.put(transitions.resize(entry, epoch=self.epoch, workers=shares[entry.id].workers))
        started = [entry for entry in found.entries if entry.id in shares and shares[entry.id].workers]
        for entry in started:
            claimed = transitions.claim(entry, epoch=self.epoch, run=f"run-{entry.id}")
            self.put(transitions.progress(claimed, epoch=self.epoch))
            workers = shares[entry.id].workers
            self.put(transitions.resize(self.entries[entry.id], epoch=self.epoch, workers=workers))
            self.began_s[entry.id] = self.now_s
            self.started_s.setdefault(entry.id, self.now_s)
        able = order.only_want_room(ready, running=running, quotas=self.cluster.quotas, misfits=found.misfits)
        could_start = able - {number for number, share in shares.items() if share.workers}
        passed = Counter(number for one in started for number in order.overtaken_by(one, ready, could_start))
        for number, times in passed.items():
            self.put(transitions.overtake(self.entries[number], times=times))

    def check(self, running, found, shares):
        used, by_user = Counter(), Counter()
        for number, share in shares.items():
            entry = self.entries[number]
            if share.workers and not exceeds(entry.needs, self.cluster):
                used.update({node: share.nodes.count(node) * entry.needs.cores_per_worker for node in share.nodes})
                by_user[entry.user] += share.workers * entry.needs.cores_per_worker
                assert entry.needs.least <= share.workers <= entry.needs.most
        assert all(cores <= self.cluster.nodes[node] for node, cores in used.items()), "a core was given twice"
        assert all(by_user[user] <= cores for user, cores in self.cluster.quotas.items())
        could = {e.id for e in found.entries} - order.over_quota(found.entries, self.cluster.quotas)
        is_idle = not any(share.workers for share in shares.values())
        assert not (is_idle and (could or running)), "the machines are idle while jobs wait"

    def tick(self):
        """Until the next job ends, or for a while."""
        self.decide()
        running = self.running()
        self.now_s += TICK_S
        for entry in running:
            self.left_s[entry.id] -= TICK_S * (1.0 if entry.workers == 1 else 1.6)
            if self.left_s[entry.id] <= 0:
                self.put(transitions.finish(self.entries[entry.id], epoch=self.epoch))
