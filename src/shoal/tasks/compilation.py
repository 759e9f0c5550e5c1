"""torch.compile as a setting: the same code for the same shapes, compiled once per machine."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from torch import nn

from shoal.spec.private_file import open_lock_file

CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
MAX_SHAPES = 256
"""Shapes of inputs for which a model is compiled, at most."""


def compile_model(model: nn.Module, cache_dir: Path) -> None:
    """Compile every call of the model, in place: names in its state stay as they are.

    Each shape of inputs gets code of its own. Code for many shapes would be used or not depending on what a worker has
    seen before, and its bits may differ. For the same reason torch must not give up and go on without compiled code.
    """
    use_cache(cache_dir)
    import torch._dynamo

    config = torch._dynamo.config
    config.recompile_limit = config.accumulated_recompile_limit = MAX_SHAPES
    config.fail_on_recompile_limit_hit = True
    model.compile(dynamic=False)


def use_cache(cache_dir: Path) -> None:
    """Let torch keep code in Shoal's cache, unless the user has named a place. torch sets the variable to its own
    default as soon as anything asks for the place, such as a library that is imported before."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    named = os.environ.get(CACHE_VARIABLE)
    if named is None or os.path.abspath(named) == os.path.abspath(default_cache_dir()):
        os.environ[CACHE_VARIABLE] = str(cache_dir / "compiled")


@contextlib.contextmanager
def one_at_a_time(cache_dir: Path, compiles: bool) -> Iterator[None]:
    """A block for the first calls of a model that `compiles`: one process of a machine does, the others find its
    code."""
    if not compiles:
        yield
        return
    cache_dir.mkdir(parents=True, exist_ok=True)
    with open_lock_file(cache_dir / "compiled.lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
