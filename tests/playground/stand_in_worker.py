"""What a worker says to its driver, without training anything."""

import os
import socket

from stand_in_server import PATIENCE_S, stand_in

from shoal.events import Stream

CUTS = [0, 1000, 2000, 3000, 4000, 4100]


def main():
    with stand_in("worker") as (seat, paths, tie):
        tie.connect(PATIENCE_S)
        stream = Stream(paths.events, f"worker-{seat}")
        stream.emit("worker_started", pid=os.getpid(), host=socket.gethostname())
        tie.say("cuts", cuts=CUTS)
        number, position = 0, None
        while tie.alone_s < PATIENCE_S and paths.root.exists():
            view = tie.wait(seat, after=number, position=position, timeout_s=0.2)
            if view is None:
                continue
            number = view.number
            if view.stop or seat in view.leave:
                return
            if view.loads == seat:
                position = 0
            if seat in view.carries:
                position = view.position + 2
                stream.emit("joined", step=position // 2, view=number, lanes=view.carries[seat], saves=True)
                while not tie.newer(number) and tie.alone_s < PATIENCE_S:
                    tie.wait_table(10**9, 0.02)
