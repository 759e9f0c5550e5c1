"""A worker in a process of its own, without torch: pushes -1 for every element, and says what came of it.

    python client_process.py ADDRESS WORKER STEPS

The token comes by the environment.
"""

import sys

import numpy as np

import shoal.server


def main():
    address, worker, steps = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    with shoal.server.connect(address, worker=worker) as client:
        values = client.pull()
        minus = {name: np.full_like(value, -1) for name, value in values.items()}
        print("at", client.step, flush=True)
        for _ in range(steps):
            values = client.push(minus)
            print("did", client.step, flush=True)
        low, high = min(v.min() for v in values.values()), max(v.max() for v in values.values())
        print("values", float(low), float(high), "torch" in sys.modules, flush=True)


if __name__ == "__main__":
    main()
