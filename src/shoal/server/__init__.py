"""Parameter servers for programs in any framework: numpy in, numpy out, and workers need no torch.

    with shoal.server.start({"w": w, "b": b}, optimizer={"name": "Adam", "args": {"lr": 0.001}}, workers=4) as servers:
        ...                                                # start workers; give them servers.address and servers.token

    with shoal.server.connect(address, token=token, worker=0) as client:     # in each worker
        values = client.pull()
        values = client.push({"w": gradient_of_w, "b": gradient_of_b})

The process that starts the servers watches and replaces them; workers do not notice the death of a server.
"""

from __future__ import annotations

from shoal.server.client import Client, connect
from shoal.server.start import Servers, start

__all__ = ["Client", "Servers", "connect", "start"]
