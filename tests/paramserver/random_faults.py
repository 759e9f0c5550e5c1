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
    chance = cluster.chance

    def kill():
        cluster.kill_random_servers(most=2)

    def doom():
        for seat in chance.sample(cluster.servers, min(2, len(cluster.servers))):
            if cluster.survives_without(seat):
                cluster.doom(seat, CrashPoint.at_random(chance, *CRASH_FRAME_KINDS))

    def grow():
        cluster.scale(cluster.placement.wanted + 1)

    def shrink():
        if cluster.placement.wanted > cluster.placement.backups + 1:
            cluster.scale(cluster.placement.wanted - 1)

    def drain():
        if cluster.servers:
            cluster.drain(chance.choice(cluster.servers))

    def cut():
        if cluster.servers:
            cluster.cut()

    def lose():
        if len(cluster.workers) > 1:
            cluster.kill_random_worker()

    for step in range(1, cluster.steps, every):
        cluster.on_step[step] = [chance.choice([kill, kill, doom, doom, cut, grow, shrink, drain, lose])]
