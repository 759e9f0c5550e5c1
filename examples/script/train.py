"""A job without a job file: python examples/script/train.py"""

import sys

import torch
from torch import nn

import shoal


class Net(nn.Sequential):
    """Workers import this file to find the class: that is why the rest stands under the guard below."""

    def __init__(self, hidden=64):
        super().__init__(nn.Linear(64, hidden), nn.ReLU(), nn.Dropout(0.2), nn.Linear(hidden, 10))


def job(**changes):
    """The same fields as in a job file; classes and functions stand for their names."""
    fields = {
        "name": "script",
        "model": {"name": Net, "args": {"hidden": 128}},
        "loss": nn.CrossEntropyLoss,
        "metrics": ["accuracy"],
        "optimizer": {"name": torch.optim.AdamW, "args": {"lr": 0.003}},
        "data": {
            "source": {"kind": "sklearn", "name": "digits"},
            "split": {"kind": "holdout", "validation": 0.2, "stratify": True},
        },
        "batch_size": 64,
        "epochs": 15,
        "lanes": 2,
    }
    return shoal.Job(**fields | changes)


def look(paths, event, picture):
    """Called for everything that happens."""
    if event.kind == "evaluated":
        print(f"step {event.step}: accuracy {picture.metrics['accuracy']:.3f}")


if __name__ == "__main__":
    outcome = shoal.run(job(), runs=sys.argv[1] if len(sys.argv) > 1 else "runs", look=look)
    print(f"weights {outcome.receipt.weights_sha256}")
    model = shoal.load(outcome.paths.root)
    print("a blank page looks like a", int(model(torch.zeros(1, 64)).argmax()))
