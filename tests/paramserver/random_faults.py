"""Something bad at every other step."""

from shoal.paramserver import protocol
from tests.paramserver.cluster import CrashPoint

CRASH_FRAME_KINDS = [
    None,
    protocol.PUSH,
    protocol.APPLY,
    protocol.RECORD,
    protocol.ACK,
    protocol.SET,
    protocol.ENTER,
    protocol.STAMPS,
]


def schedule_random_faults(cluster, *, every=2):
    rng = cluster.rng

    def kill():
        cluster.kill_random_servers(most=2)

    def crash():
        for seat in rng.sample(cluster.servers, min(2, len(cluster.servers))):
            if cluster.survives_without(seat):
                cluster.schedule_crash(seat, CrashPoint.at_random(rng, *CRASH_FRAME_KINDS))

    def grow():
        cluster.scale(cluster.placement.wanted_servers + 1)

    def shrink():
        if cluster.placement.wanted_servers > cluster.placement.backups + 1:
            cluster.scale(cluster.placement.wanted_servers - 1)

    def drain():
        if cluster.servers:
            cluster.drain(rng.choice(cluster.servers))

    def cut():
        if cluster.servers:
            cluster.break_connection()

    def lose():
        if len(cluster.workers) > 1:
            cluster.kill_random_worker()

    for step in range(1, cluster.steps, every):
        cluster.on_step[step] = [rng.choice([kill, kill, crash, crash, cut, grow, shrink, drain, lose])]
