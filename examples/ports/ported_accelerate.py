"""python examples/ports/ported_accelerate.py: a script stays a script; `shoal.run` starts the workers."""

import sys

import shoal
from net import Digits, Net


def main(workers="2", runs="runs"):
    job = shoal.Job(
        name="from-accelerate",
        model=Net,
        loss="CrossEntropyLoss",
        optimizer={"name": "AdamW", "args": {"lr": 0.01}},
        clip={"norm": 0.5},
        data={
            "source": {"kind": "python", "factory": Digits},
            "validation": {"kind": "python", "factory": {"name": Digits, "args": {"train": False}}},
            "sampler": {"kind": "random", "shuffle": False},
        },
        batch_size=70,  # two batches of 35
        lanes=2,  # gradient_accumulation_steps, if there is one worker
        workers=int(workers),
        epochs=2,
    )
    outcome = shoal.run(job, runs=runs)
    print(outcome.paths.root, outcome.receipt.weights_sha256)


if __name__ == "__main__":
    main(*sys.argv[1:])
