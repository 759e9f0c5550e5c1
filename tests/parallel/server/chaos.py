"""Something bad at every other step."""

from shoal.parallel.server import frames
from tests.parallel.server.harbour import Doom

FATAL = [None, frames.PUSH, frames.APPLY, frames.RECORD, frames.ACK, frames.SET, frames.ENTER, frames.STAMPS]


def chaos(harbour, *, every=2):
    chance = harbour.chance

    def kill():
        harbour.kill_some(most=2)

    def doom():
        for seat in chance.sample(harbour.servers, min(2, len(harbour.servers))):
            if harbour.spares(seat):
                harbour.doom(seat, Doom.at_random(chance, *FATAL))

    def grow():
        harbour.scale(harbour.placement.wanted + 1)

    def shrink():
        if harbour.placement.wanted > harbour.placement.backups + 1:
            harbour.scale(harbour.placement.wanted - 1)

    def drain():
        if harbour.servers:
            harbour.drain(chance.choice(harbour.servers))

    def cut():
        if harbour.servers:
            harbour.cut()

    def lose():
        if len(harbour.workers) > 1:
            harbour.lose_worker()

    for step in range(1, harbour.steps, every):
        harbour.on_step[step] = [chance.choice([kill, kill, doom, doom, cut, grow, shrink, drain, lose])]
