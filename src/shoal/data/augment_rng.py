"""Randomness that belongs to a batch: any worker, thread or process that builds the batch draws the same numbers."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from shoal.data.batch import Batch
from shoal.errors import error
from shoal.spec.resolve import is_users_failure, user_error


@contextmanager
def seeded_rng(seed: int) -> Iterator[None]:
    """Seed the global generators of torch, numpy and random inside the block, and restore them afterwards.

    Only for the thread that computes: the generators belong to the process.
    """
    before = torch.random.get_rng_state(), np.random.get_state(), random.getstate()
    torch.default_generator.manual_seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    random.seed(seed)
    try:
        yield
    finally:
        torch.random.set_rng_state(before[0])
        np.random.set_state(before[1])
        random.setstate(before[2])


@contextmanager
def single_threaded() -> Iterator[None]:
    """Torch computes with one thread inside the block. The setting belongs to the process: not for side threads."""
    threads = torch.get_num_threads()
    if threads == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@dataclass(frozen=True)
class Augment:
    """The user's function. It gets its own generator if it accepts one; otherwise the global generators are seeded."""

    function: Callable[..., Batch]
    takes_generator: bool

    @classmethod
    def of(cls, function: Callable[..., Batch]) -> Augment:
        return cls(function, _takes_generator(function))

    def __call__(self, batch: Batch, seed: int) -> Batch:
        if self.takes_generator:
            generator = torch.Generator().manual_seed(seed)
            return apply_user_function(lambda b: self.function(b, generator=generator), batch, "augment")
        with seeded_rng(seed):
            return apply_user_function(self.function, batch, "augment")


@dataclass(frozen=True)
class AugmentSequence:
    """Several augmentations in order. Each draws from a generator of its own, whether it takes one or not."""

    steps: tuple[Augment, ...]

    def __call__(self, batch: Batch, *, generator: torch.Generator) -> Batch:
        for step in self.steps:
            batch = step(batch, int(torch.randint(2**62, (), generator=generator)))
        return batch


def apply_user_function(function: Callable[[Batch], Any], batch: Batch, role: str) -> Batch:
    """The batch that the user's function returns. Its failures become errors that name its line."""
    try:
        made = function(batch)
    except BaseException as failure:
        if not is_users_failure(failure):
            raise
        raise user_error("SH311", failure, role) from failure
    if not isinstance(made, Batch):
        raise error("SH311", f"{role} returned a {type(made).__name__}", fix="Return a shoal.data.batch.Batch.")
    if batch.weight is not None and made.weight is None:  # the function made a new batch of the same samples
        if made.size != batch.size:
            message = f"{role} returned {made.size} samples for {batch.size}, and their weights are lost"
            raise error("SH311", message, fix="Return a batch with `weight`, too.")
        return replace(made, weight=batch.weight)
    return made


def _takes_generator(function: Callable[..., Any]) -> bool:
    try:
        return "generator" in inspect.signature(function).parameters
    except (TypeError, ValueError):  # written in C, without a signature
        return False
