"""A plain script, from nothing to its first step: `python -m benchmarks.overhead.script DATA`."""

import sys
import time
from pathlib import Path

start = time.time()

import torch  # noqa: E402

imported = time.time()

from benchmarks.overhead import plain  # noqa: E402
from benchmarks.overhead.models import mlp  # noqa: E402

if __name__ == "__main__":
    batches = plain.from_tensors(*plain.arrays(Path(sys.argv[1]), "mlp"), 128)
    loaded = time.time()
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    built = time.time()
    plain.train(model, optimizer, batches, steps=1)
    print(start, imported, loaded, built, time.time())
