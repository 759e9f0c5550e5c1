"""`shard: pipeline`: members hold consecutive stretches of the model, and a lane's samples go through in microbatches.

A stretch begins with a module's input and ends before another's. Every member calls the model's own code: what comes
before its stretch runs without memory or arithmetic on the meta device, which tells the shapes of what must be
received for a batch of any size; at the end of the stretch the call is abandoned. Nothing is traced, so the code may
be any, as long as the inputs of the modules at the cuts are all that later code needs of what came before.

torch's own stages want microbatches of one shape and a loss apart from the model; ours are cut from a lane of any
size, and the loss is the user's, who calls the model. The generator's state travels with the activations: with one
microbatch, dropout draws the numbers that it would draw in a single process.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, distributed, nn
from torch.distributed import Work
from torch.utils import _pytree as pytree

from shoal.errors import error
from shoal.parallel.replica import LossFunction
from shoal.parallel.shard.before import Before, skim, without_memory
from shoal.parallel.shard.blueprint import named_tensors
from shoal.parallel.shard.grid import Grid, take_from
from shoal.parallel.shard.stages import Survey, order, survey


class Batch(Protocol):
    """What a lane gets, and can be cut."""

    @property
    def size(self) -> int: ...

    def parts(self, count: int) -> Sequence[Any]:
        """In so many batches, or as many as there are samples."""


class _Leave(BaseException):
    """Carries a stretch's result out of the user's code, past every `except Exception`."""

    def __init__(self, values: list[Tensor]) -> None:
        super().__init__()
        self.values = values


@dataclass
class _Pass:
    """One microbatch on its way through this stretch. `sent` is on its way to the next one."""

    received: list[Tensor] = field(default_factory=list)
    results: list[Tensor] = field(default_factory=list)
    weight: Tensor | None = None
    entered: bool = False
    sent: list[_Sent] = field(default_factory=list)


_Sent = tuple[Work, Tensor]
"""Who sends must leave the values alone until it is done."""


class PipelineCut:
    """See Cut. `example` is a batch; values do not matter."""

    together = True

    def __init__(
        self,
        model: nn.Module,
        grid: Grid,
        *,
        cuts: Sequence[str],
        loss: LossFunction,
        example: Any,
        microbatches: int = 4,
        schedule: str = "1f1b",
        seen: Survey | None = None,
    ) -> None:
        self.model, self.grid, self.cuts = model, grid, list(cuts)
        self._microbatches, self._schedule = microbatches, schedule
        seen = seen or survey(model, lambda: loss(model, example))
        self.holders = seen.stages_of(cuts)
        """The seats that hold each parameter and buffer."""
        self._enter = model.get_submodule(cuts[grid.seat - 1]) if grid.seat else None
        self._leave = model.get_submodule(cuts[grid.seat]) if grid.seat < len(cuts) else None
        for name in seen.done_before(cuts[grid.seat - 1]) if grid.seat else ():
            skim(model.get_submodule(name))
        _give_memory(model, {name for name, seats in self.holders.items() if grid.seat in seats})

    def run(self, loss: LossFunction, batch: Batch, share: float) -> tuple[Tensor, Tensor | None]:
        parts = batch.parts(self._microbatches)
        acts = order(self._schedule, stage=self.grid.seat, stages=self.grid.ways, microbatches=len(parts))
        passes: dict[int, _Pass] = {}
        returned: list[_Sent] = []
        total = torch.zeros(3, dtype=torch.float64)  # loss, count, and whether there is a count
        for verb, i in acts:
            if verb == "forward":
                passes[i] = self._forward(loss, parts[i], share * parts[i].size / batch.size, total)
            else:
                grads = self._backward(passes.pop(i))
                _wait(returned)
                returned = self._send(grads, self.grid.seat - 1)
        _wait(returned)
        self._add_shared()
        take_from([total], self.grid.rank_of(self.grid.ways - 1), self.grid.shard_group)
        return total[0], total[1] if total[2] else None

    def holder(self, name: str) -> int:
        return self.holders[name][0]

    @torch.no_grad()
    def look(self, act: Callable[[nn.Module, Any], Any], batch: Any) -> Any:
        passing = _Pass()
        result = self._call(act, batch, passing)
        _wait(passing.sent)
        return result

    # ---- one microbatch ----

    def _forward(self, loss: LossFunction, batch: Any, share: float, total: Tensor) -> _Pass:
        passing = _Pass()
        result = self._call(loss, batch, passing)
        if self._leave is not None:
            return passing
        if isinstance(result, tuple):
            value, count = result
            counts = float(share > 0)
            passing.weight = torch.tensor(counts, dtype=value.dtype)
            total += torch.tensor([float(value.detach()) * counts, float(count) * counts, 1.0], dtype=torch.float64)
        else:
            value, passing.weight = result, torch.tensor(share, dtype=result.dtype)
            total[0] += float(value.detach()) * share
        passing.results = [value]
        return passing

    def _call(self, act: Callable[[nn.Module, Any], Any], batch: Any, passing: _Pass) -> Any:
        """This stretch of what `act` does with the model; its result, if this is the last one."""
        before = Before(on=False)
        try:
            with before, self._hooks(passing, before):
                return act(self.model, batch)
        except _Leave as leaving:
            passing.results = [value for value in leaving.values if value.requires_grad]
            values = [value.detach() for value in leaving.values]
            passing.sent = self._send([*values, torch.get_rng_state()], self.grid.seat + 1)
        except (RuntimeError, NotImplementedError) as problem:
            if not passing.entered or "meta" not in str(problem):
                raise
            message = (
                "the model uses something after a cut that it has computed before, and that is not the input there"
            )
            fix = "Cut where all that later layers need goes through one module's arguments, or use `shard: fsdp`."
            raise error("SH107", message, where="shard.cuts", fix=fix) from problem
        return None

    @contextlib.contextmanager
    def _hooks(self, passing: _Pass, before: Before) -> Iterator[None]:
        def begin(_: nn.Module, args: Any, kwargs: Any) -> Any:
            before.on = True
            return without_memory((args, kwargs))

        def enter(_: nn.Module, args: Any, kwargs: Any) -> Any:
            if passing.entered:
                raise error("SH107", "the loss calls the model more than once", where="shard", fix="Use `shard: fsdp`.")
            before.on, before.over, passing.entered = False, True, True
            leaves, spec = pytree.tree_flatten((args, kwargs))
            values = self._receive_into(leaves, passing)
            for leaf, value in zip(leaves, values, strict=True):
                if isinstance(leaf, Tensor):  # a mask, say, that the code around hands to later modules too
                    before.learn(leaf, value)
            return pytree.tree_unflatten(values, spec)

        def leave(_: nn.Module, args: Any, kwargs: Any) -> Any:
            values = [leaf for leaf in pytree.tree_leaves(before.real((args, kwargs))) if isinstance(leaf, Tensor)]
            raise _Leave(values)

        hooks = []
        if self._enter is not None:
            hooks.append(self.model.register_forward_pre_hook(begin, with_kwargs=True))
            hooks.append(self._enter.register_forward_pre_hook(enter, with_kwargs=True))
        if self._leave is not None:
            hooks.append(self._leave.register_forward_pre_hook(leave, with_kwargs=True))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _receive_into(self, leaves: list[Any], passing: _Pass) -> list[Any]:
        """The tensors among these, which have no memory, as they are."""
        found = []
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                value = self._receive(torch.empty(leaf.shape, dtype=leaf.dtype), self.grid.seat - 1)
                if leaf.requires_grad:
                    passing.received.append(value.requires_grad_())
                leaf = value
            found.append(leaf)
        torch.set_rng_state(self._receive(torch.empty_like(torch.get_rng_state()), self.grid.seat - 1))
        return found

    def _backward(self, passing: _Pass) -> list[Tensor]:
        """Returns what the stretch before this one waits for."""
        if self._leave is None:
            weights: list[Tensor | None] = [passing.weight]
        else:
            weights = [self._receive(torch.empty_like(value), self.grid.seat + 1) for value in passing.results]
            _wait(passing.sent)
        if passing.results:  # what comes out of frozen layers has no gradient
            torch.autograd.backward(passing.results, weights)
        return [torch.zeros_like(v) if v.grad is None else v.grad for v in passing.received]

    # ---- between members ----

    def _send(self, values: Sequence[Tensor], seat: int) -> list[_Sent]:
        sent = []
        for value in values:
            value = value.contiguous()
            work = distributed.isend(value, self.grid.rank_of(seat), group=self.grid.shard_group)
            assert work is not None
            sent.append((work, value))
        return sent

    def _receive(self, into: Tensor, seat: int) -> Tensor:
        into = into.contiguous()
        self.grid.receive(into, self.grid.rank_of(seat), self.grid.shard_group)
        return into

    def _add_shared(self) -> None:
        """A parameter that several stretches use has a gradient in each: their sum, in the order of stretches."""
        for name, parameter in self.model.named_parameters():
            seats = self.holders[name]
            if len(seats) == 1 or self.grid.seat not in seats or not parameter.requires_grad:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            if self.grid.seat == seats[0]:
                for seat in seats[1:]:
                    parameter.grad += self._receive(torch.empty_like(parameter.grad), seat)
                for seat in seats[1:]:
                    _wait(self._send([parameter.grad], seat))
            else:
                _wait(self._send([parameter.grad], seats[0]))
                parameter.grad = self._receive(torch.empty_like(parameter.grad), seats[0])


def _wait(sent: Sequence[_Sent]) -> None:
    for work, _ in sent:
        work.wait()


def _give_memory(model: nn.Module, names: set[str]) -> None:
    """To the parameters and buffers of these names, wherever they stand; what is tied stays tied."""
    wanted = {id(tensor) for name, tensor in named_tensors(model).items() if name in names}
    made: dict[int, Tensor] = {}
    for module in model.modules():
        for table in (module._parameters, module._buffers):
            for key, tensor in table.items():
                if tensor is not None and id(tensor) in wanted:
                    if id(tensor) not in made:
                        made[id(tensor)] = _with_memory(tensor)
                    table[key] = made[id(tensor)]  # type: ignore[assignment]


def _with_memory(tensor: Tensor) -> Tensor:
    real = torch.empty_like(tensor, device="cpu", requires_grad=False)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(real, requires_grad=tensor.requires_grad)
    return real
