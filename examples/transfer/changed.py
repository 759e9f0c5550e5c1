"""Which weights did the second job change? python examples/transfer/changed.py backbone-1 transfer-1"""

import argparse

import torch

import shoal


def changed(before, after):
    """Each tensor that both have, and whether a single bit of it differs."""
    old = before.body.state_dict()
    return {name: not torch.equal(old[name], new) for name, new in after.backbone.state_dict().items()}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("before", nargs="?", default="backbone-1")
    parser.add_argument("after", nargs="?", default="transfer-1")
    parser.add_argument("--runs", default="runs", help="where runs are kept")
    args = parser.parse_args()
    models = [shoal.load(run, runs=args.runs) for run in (args.before, args.after)]
    for name, differs in changed(*models).items():
        print(f"{'changed' if differs else 'the same':10}{name}")
