"""`shard: pipeline`: ranks hold consecutive stages of the model, and a lane's samples pass through in micro-batches.

A stage begins with a module's input and ends before the input of another. Every rank calls the model's own code. The
code before its stage runs on the meta device, without memory or arithmetic, and gives the shapes of the tensors to
receive for a batch of any size. At the end of the stage the call is abandoned. Nothing is traced, so any code works, as
long as later code needs only the inputs of the modules at the split points.

torch's own stages need micro-batches of one shape and a loss outside of the model. Here micro-batches come from a lane
of any size, and the user's loss calls the model. The generator's state is sent with the activations: with one
micro-batch, dropout draws the same numbers as in a single process.
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
from shoal.lanes.loss import LossFunction, split_loss
from shoal.sharding.deferred_init import named_tensors
from shoal.sharding.device_mesh import ShardMesh, broadcast
from shoal.sharding.meta_prefix import MetaPrefix, cache_meta_forward, to_meta
from shoal.sharding.pipeline_schedule import ForwardTrace, stage_schedule, trace_forward


class SplittableBatch(Protocol):
    """A lane's batch that can be split into micro-batches."""

    @property
    def size(self) -> int: ...

    def chunk(self, count: int) -> Sequence[Any]:
        """Split into `count` batches, or into one per sample if there are fewer samples."""


class _StageExit(BaseException):
    """Carries a stage's result out of the user's code, past every `except Exception`."""

    def __init__(self, values: list[Tensor]) -> None:
        super().__init__()
        self.values = values


@dataclass
class _Microbatch:
    """One micro-batch in this stage. `pending_sends` go to the next stage."""

    inputs: list[Tensor] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)
    loss_weight: Tensor | None = None
    entered: bool = False
    pending_sends: list[_PendingSend] = field(default_factory=list)


_PendingSend = tuple[Work, Tensor]
"""A send and its values, which must not change until it is done."""


class PipelineParallelModel:
    """See ShardedModel. `example` is a batch, whose values do not matter."""

    shares_lane = True

    def __init__(
        self,
        model: nn.Module,
        mesh: ShardMesh,
        *,
        split_points: Sequence[str],
        loss: LossFunction,
        example: Any,
        microbatches: int = 4,
        schedule: str = "1f1b",
        trace: ForwardTrace | None = None,
    ) -> None:
        self.model, self.mesh, self.split_points = model, mesh, list(split_points)
        self._microbatches, self._schedule = microbatches, schedule
        trace = trace or trace_forward(model, lambda: loss(model, example))
        self.owners = trace.stages_of(split_points)
        """The shard ranks that hold each parameter and buffer."""
        self._first_module = model.get_submodule(split_points[mesh.shard_rank - 1]) if mesh.shard_rank else None
        self._next_stage_module = (
            model.get_submodule(split_points[mesh.shard_rank]) if mesh.shard_rank < len(split_points) else None
        )
        for name in trace.completed_before(split_points[mesh.shard_rank - 1]) if mesh.shard_rank else ():
            cache_meta_forward(model.get_submodule(name))
        _allocate(model, {name for name, seats in self.owners.items() if mesh.shard_rank in seats})

    def forward_backward(
        self, loss: LossFunction, batch: SplittableBatch, share: float
    ) -> tuple[Tensor, Tensor | None]:
        chunks = batch.chunk(self._microbatches)
        schedule = stage_schedule(
            self._schedule, stage=self.mesh.shard_rank, stages=self.mesh.replica_size, microbatches=len(chunks)
        )
        in_flight: dict[int, _Microbatch] = {}
        pending_sends: list[_PendingSend] = []
        total = torch.zeros(3, dtype=torch.float64)  # loss, count, and whether there is a count
        for kind, i in schedule:
            if kind == "forward":
                in_flight[i] = self._forward(loss, chunks[i], share * chunks[i].size / batch.size, total)
            else:
                grads = self._backward(in_flight.pop(i))
                _wait_for_sends(pending_sends)
                pending_sends = self._send(grads, self.mesh.shard_rank - 1)
        _wait_for_sends(pending_sends)
        self._sum_shared_gradients()
        broadcast([total], self.mesh.global_rank(self.mesh.replica_size - 1), self.mesh.shard_group)
        return total[0], total[1] if total[2] else None

    def owner(self, name: str) -> int:
        return self.owners[name][0]

    @torch.no_grad()
    def forward(self, function: Callable[[nn.Module, Any], Any], batch: Any) -> Any:
        microbatch = _Microbatch()
        result = self._run_stage(function, batch, microbatch)
        _wait_for_sends(microbatch.pending_sends)
        return result

    # ---- one micro-batch ----

    def _forward(self, loss: LossFunction, batch: Any, share: float, total: Tensor) -> _Microbatch:
        microbatch = _Microbatch()
        result = self._run_stage(loss, batch, microbatch)
        if self._next_stage_module is not None:
            return microbatch
        value, count = split_loss(result)
        weight = share if count is None else float(share > 0)
        microbatch.loss_weight = torch.tensor(weight, dtype=value.dtype)
        total[0] += float(value.detach()) * weight
        if count is not None:
            total[1:] += torch.tensor([float(count) * weight, 1.0], dtype=torch.float64)
        microbatch.outputs = [value]
        return microbatch

    def _run_stage(self, function: Callable[[nn.Module, Any], Any], batch: Any, microbatch: _Microbatch) -> Any:
        """Run this stage of `function`; returns its result in the last stage."""
        prefix = MetaPrefix(active=False)
        try:
            with prefix, self._stage_hooks(microbatch, prefix):
                return function(self.model, batch)
        except _StageExit as leaving:
            microbatch.outputs = [value for value in leaving.values if value.requires_grad]
            values = [value.detach() for value in leaving.values]
            microbatch.pending_sends = self._send([*values, torch.get_rng_state()], self.mesh.shard_rank + 1)
        except (RuntimeError, NotImplementedError) as problem:
            if not microbatch.entered or "meta" not in str(problem):
                raise
            message = (
                "after a cut the model uses a value that it computed before the cut and that is not an input there"
            )
            fix = "Cut where all that later layers need goes through one module's arguments, or use `shard: fsdp`."
            raise error("SH107", message, where="shard.cuts", fix=fix) from problem
        return None

    @contextlib.contextmanager
    def _stage_hooks(self, microbatch: _Microbatch, prefix: MetaPrefix) -> Iterator[None]:
        def begin(_: nn.Module, args: Any, kwargs: Any) -> Any:
            prefix.active = True
            return to_meta((args, kwargs))

        def enter(_: nn.Module, args: Any, kwargs: Any) -> Any:
            if microbatch.entered:
                raise error("SH107", "the loss calls the model more than once", where="shard", fix="Use `shard: fsdp`.")
            prefix.active, prefix.finished, microbatch.entered = False, True, True
            leaves, spec = pytree.tree_flatten((args, kwargs))
            values = self._receive_inputs(leaves, microbatch)
            for leaf, value in zip(leaves, values, strict=True):
                if isinstance(
                    leaf, Tensor
                ):  # for example, a mask that the surrounding code also passes to later modules
                    prefix.register_real(leaf, value)
            return pytree.tree_unflatten(values, spec)

        def leave(_: nn.Module, args: Any, kwargs: Any) -> Any:
            values = [leaf for leaf in pytree.tree_leaves(prefix.resolve((args, kwargs))) if isinstance(leaf, Tensor)]
            raise _StageExit(values)

        hooks = []
        if self._first_module is not None:
            hooks.append(self.model.register_forward_pre_hook(begin, with_kwargs=True))
            hooks.append(self._first_module.register_forward_pre_hook(enter, with_kwargs=True))
        if self._next_stage_module is not None:
            hooks.append(self._next_stage_module.register_forward_pre_hook(leave, with_kwargs=True))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _receive_inputs(self, leaves: list[Any], microbatch: _Microbatch) -> list[Any]:
        """Replace the meta tensors among these by the received values."""
        received = []
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                value = self._receive(torch.empty(leaf.shape, dtype=leaf.dtype), self.mesh.shard_rank - 1)
                if leaf.requires_grad:
                    microbatch.inputs.append(value.requires_grad_())
                leaf = value
            received.append(leaf)
        torch.set_rng_state(self._receive(torch.empty_like(torch.get_rng_state()), self.mesh.shard_rank - 1))
        return received

    def _backward(self, microbatch: _Microbatch) -> list[Tensor]:
        """Returns the gradients for the previous stage."""
        if self._next_stage_module is None:
            weights: list[Tensor | None] = [microbatch.loss_weight]
        else:
            weights = [self._receive(torch.empty_like(value), self.mesh.shard_rank + 1) for value in microbatch.outputs]
            _wait_for_sends(microbatch.pending_sends)
        if microbatch.outputs:  # outputs of frozen layers have no gradient
            torch.autograd.backward(microbatch.outputs, weights)
        return [torch.zeros_like(v) if v.grad is None else v.grad for v in microbatch.inputs]

    # ---- between stages ----

    def _send(self, values: Sequence[Tensor], shard_rank: int) -> list[_PendingSend]:
        sent = []
        for value in values:
            value = value.contiguous()
            work = distributed.isend(value, self.mesh.global_rank(shard_rank), group=self.mesh.shard_group)
            assert work is not None
            sent.append((work, value))
        return sent

    def _receive(self, buffer: Tensor, shard_rank: int) -> Tensor:
        buffer = buffer.contiguous()
        self.mesh.receive(buffer, self.mesh.global_rank(shard_rank), self.mesh.shard_group)
        return buffer

    def _sum_shared_gradients(self) -> None:
        """Sum the gradients of a parameter that several stages use, in the order of the stages."""
        for name, parameter in self.model.named_parameters():
            owners = self.owners[name]
            if len(owners) == 1 or self.mesh.shard_rank not in owners or not parameter.requires_grad:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            if self.mesh.shard_rank == owners[0]:
                for owner in owners[1:]:
                    parameter.grad += self._receive(torch.empty_like(parameter.grad), owner)
                for owner in owners[1:]:
                    _wait_for_sends(self._send([parameter.grad], owner))
            else:
                _wait_for_sends(self._send([parameter.grad], owners[0]))
                parameter.grad = self._receive(torch.empty_like(parameter.grad), owners[0])


def _wait_for_sends(sends: Sequence[_PendingSend]) -> None:
    for work, _ in sends:
        work.wait()


def _allocate(model: nn.Module, names: set[str]) -> None:
    """Give memory to the parameters and buffers with these names; tied tensors stay tied."""
    wanted = {id(tensor) for name, tensor in named_tensors(model).items() if name in names}
    allocated: dict[int, Tensor] = {}
    for module in model.modules():
        for table in (module._parameters, module._buffers):
            for key, tensor in table.items():
                if tensor is not None and id(tensor) in wanted:
                    if id(tensor) not in allocated:
                        allocated[id(tensor)] = _allocated(tensor)
                    table[key] = allocated[id(tensor)]  # type: ignore[assignment]


def _allocated(tensor: Tensor) -> Tensor:
    real = torch.empty_like(tensor, device="cpu", requires_grad=False)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(real, requires_grad=tensor.requires_grad)
    return real
