"""`python -m shoal.fleet.agents.machine_bridge FILE RUN CORES`: an agent on a machine of a queue, as a process here.

It asks the daemon of the queue, whose address is in FILE, for so many cores. The daemon answers when a machine has
them; from then on this process passes on what engine and agent say. The agent ends with it.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from shoal.fleet.driver_address import read_driver_address
from shoal.net.errors import LinkError
from shoal.net.listener import connect_host
from shoal.net.relay import CHUNK_BYTES, relay_pipes

NO_DAEMON = 3
"""The exit code if no daemon answers."""


def main() -> None:
    file, run, cores = sys.argv[1:4]
    address = read_driver_address(Path(file))
    try:
        if address is None:
            raise LinkError(f"{file} names no daemon")
        hello = json.dumps({"run": run, "cores": int(cores)}).encode()
        sock = connect_host(address.host, address.port, address.token, hello)
    except LinkError as failure:
        print(failure, file=sys.stderr)
        sys.exit(NO_DAEMON)
    os.write(1, sock.recv(CHUNK_BYTES))  # until an agent answers, the daemon must see when this process is ended
    relay_pipes(sock, source=0, sink=1)
    os._exit(0)  # a thread may still wait for input


if __name__ == "__main__":
    main()
