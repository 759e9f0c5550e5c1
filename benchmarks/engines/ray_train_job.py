"""Ray Train's recipe: `python -m benchmarks.engines.ray_train_job ADDRESS DIR`. A failure starts all workers again."""

from __future__ import annotations

import sys
from pathlib import Path

import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

from benchmarks.engines.rival_job import train


def loop(settings: dict[str, str]) -> None:
    train(Path(settings["directory"]))


def main() -> None:
    address, directory = sys.argv[1:]
    ray.init(address=address, log_to_driver=False)
    trainer = TorchTrainer(
        loop,
        train_loop_config={"directory": directory},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 1}),
        run_config=RunConfig(storage_path=directory, failure_config=FailureConfig(max_failures=10)),
    )
    trainer.fit()


if __name__ == "__main__":
    main()
