"""What one contributor carries from one step to the next."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


class Residual:
    """`floats` values in two banks: encoding reads the one and writes the other, and `settle` says that it counted.

    A step that is discarded and done again finds the memory as it was. Several stretches may share a memory, each with
    a part of its own; then all of them are encoded before it is settled. Nothing is allocated before the first use.

    A step may also change what it starts from, part by part (`branch`, `turn`); a discarded one goes `back`.
    """

    def __init__(self, floats: int, *, device: torch.device | str = "cpu") -> None:
        self.floats = floats
        self._device = torch.device(device)
        self._current: Tensor | None = None
        self._next: Tensor | None = None
        self._committed: Tensor | None = None
        self._branched = False

    def before_and_after(self, start: int = 0, stop: int | None = None) -> tuple[Tensor | None, Tensor]:
        """`before` and `after` for `encode`; nothing was before the first step."""
        if self._next is None:
            self._next = torch.zeros(self.floats, device=self._device)
        return None if self._current is None else self._current[start:stop], self._next[start:stop]

    def branch(self) -> None:
        """What the step starts from may change from now on."""
        if not self._branched:
            self._committed, self._branched = self._current, True
            self._current = (
                torch.zeros(self.floats, device=self._device) if self._committed is None else self._committed.clone()
            )

    def carry_forward(self, start: int, stop: int) -> None:
        """This part was encoded, and will be again within the step: go on from what was left."""
        assert self._current is not None
        assert self._next is not None
        self._current[start:stop].copy_(self._next[start:stop])

    def rollback(self) -> None:
        """To what it was before the step branched."""
        if self._branched:
            self._current, self._committed, self._branched = self._committed, None, False

    def commit(self) -> None:
        """The step counts: what was left becomes what the next one starts from."""
        if self._next is None:
            raise ValueError("nothing was encoded")
        self._current, self._next = self._next, self._current
        self.commit_unchanged()

    def commit_unchanged(self) -> None:
        """The step counts, and nothing was encoded at its end."""
        self._committed, self._branched = None, False

    def state(self, *, committed: bool = True) -> dict[str, Tensor]:
        """What a checkpoint needs: the values themselves, not a copy; nothing before the first step. Those that are
        not `settled` are what they will be when the step that was encoded counts."""
        start = self._committed if self._branched else self._current
        found = start if committed else self._next
        return {} if found is None else {"memory": found}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Go on from there. The tensor is copied."""
        found = state.get("memory")
        if found is not None and (found.dtype != torch.float32 or found.shape != (self.floats,)):
            raise ValueError(f"a memory of {tuple(found.shape)} values, where the codec has {self.floats}")
        self._current = None if found is None else found.to(self._device, copy=True)
