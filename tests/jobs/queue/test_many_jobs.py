"""A user who submits 10,000 jobs: the others get their turn, and what is shown and decided stays small."""

from dataclasses import replace

import pytest
from rich.console import Console

from shoal.jobs.queue import client
from shoal.plan.queueing.elastic_shares import ElasticShares
from shoal.terminal import queue_tables
from tests.jobs.queue.test_daemon import serve, tick_until

__all__ = ["serve"]
CORES = 2


class Counted(ElasticShares):
    """Remembers how many jobs each decision was about."""

    def divide(self, now_s, running, ready, *, cluster, facts):
        self.counts = [*getattr(self, "counts", []), len(running) + len(ready)]
        return super().divide(now_s, running, ready, cluster=cluster, facts=facts)


@pytest.mark.long
def test_ten_thousand_jobs_of_one_user_keep_nobody_out(store, paths, job, serve):
    store.submit([job(name="ann", steps=3)] * 10_000, user="ann")
    (bob,) = store.submit([job(name="bob", steps=3)], user="bob")
    policy = Counted()
    served = serve(policy, cores=CORES)
    tick_until(served, lambda: store.get(bob.id).has_ended)
    assert store.get(bob.id).state == "finished"
    entries = store.entries()
    assert len(entries) == 10_001
    assert sum(entry.attempts > 0 for entry in entries if entry.user == "ann") <= 2 * CORES, "bob's turn came late"
    assert max(policy.counts) <= 3 * CORES + 8, "a decision is about those that may start soon"
    view = client.look(paths.runs)
    console = Console(width=120, record=True, quiet=True)
    queue_tables.print_queue(console, view, everything=False)
    assert len(console.export_text().splitlines()) < 100
    assert "waiting jobs are before it" in replace(view, daemon_pid=1).why(entries[5_000])
    store.apply(10_000, lambda entry: entry.model_copy(update={"priority": 9}))
    tick_until(served, lambda: store.get(10_000).has_ended)
    assert sum(entry.attempts > 0 for entry in store.entries() if entry.user == "ann") < 50, "priority goes first"
