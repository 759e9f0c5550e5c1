"""Error feedback: what a codec's encoding lost, carried from one step to the next."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


class Residual:
    """`floats` values in two banks: encoding reads one and writes the other, and `commit` swaps them.

    A step that is discarded and repeated finds the residual unchanged. Several buckets may share a residual, each with
    a range of its own; `commit` then follows after all of them are encoded. Nothing is allocated before the first use.

    A step may also change its start value range by range (`branch`, `carry_forward`); `rollback` undoes that.
    """

    def __init__(self, floats: int, *, device: torch.device | str = "cpu") -> None:
        self.floats = floats
        self._device = torch.device(device)
        self._current: Tensor | None = None
        self._next: Tensor | None = None
        self._committed: Tensor | None = None
        self._branched = False

    def before_and_after(self, start: int = 0, stop: int | None = None) -> tuple[Tensor | None, Tensor]:
        """`residual_in` and `residual_out` for `encode`; the first is None before the first step."""
        if self._next is None:
            self._next = torch.zeros(self.floats, device=self._device)
        return None if self._current is None else self._current[start:stop], self._next[start:stop]

    def branch(self) -> None:
        """Keep the committed values aside: from now on the step may change its start value."""
        if not self._branched:
            self._committed, self._branched = self._current, True
            self._current = (
                torch.zeros(self.floats, device=self._device) if self._committed is None else self._committed.clone()
            )

    def carry_forward(self, start: int, stop: int) -> None:
        """The range was encoded and will be encoded again within this step: start that from the new residual."""
        assert self._current is not None
        assert self._next is not None
        self._current[start:stop].copy_(self._next[start:stop])

    def rollback(self) -> None:
        """Return to the values before `branch`."""
        if self._branched:
            self._current, self._committed, self._branched = self._committed, None, False

    def commit(self) -> None:
        """The step is committed: the next step starts from the new residual."""
        if self._next is None:
            raise ValueError("nothing was encoded")
        self._current, self._next = self._next, self._current
        self.commit_unchanged()

    def commit_unchanged(self) -> None:
        """The step is committed, and nothing was encoded at its end."""
        self._committed, self._branched = None, False

    def state(self, *, committed: bool = True) -> dict[str, Tensor]:
        """The values for a checkpoint, not copied; empty before the first step. `committed=False` gives the values
        after the encoded step, as if it were committed."""
        start = self._committed if self._branched else self._current
        found = start if committed else self._next
        return {} if found is None else {"memory": found}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a saved state. The tensor is copied."""
        found = state.get("memory")
        if found is not None and (found.dtype != torch.float32 or found.shape != (self.floats,)):
            raise ValueError(f"a residual of shape {tuple(found.shape)}; the codec needs {self.floats} values")
        self._current = None if found is None else found.to(self._device, copy=True)
