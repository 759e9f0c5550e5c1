"""A second set of objects, built from the job and loaded with the state of a step, that computes the step again.

The training objects have a history; these have none. What a lane gets from anything but the saved state is different
here, or becomes different when the lane is computed a second time.
"""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from shoal.checkpoint.sha256 import state_sha256
from shoal.checkpoint.state_tree import State, flatten, unflatten
from shoal.checkpoint.tensor_bytes import bytes_of
from shoal.data.augment_rng import seeded_rng
from shoal.data.batch import Batch
from shoal.errors import ShoalError
from shoal.lanes.lane_sum import LaneSum
from shoal.lanes.replica import Replica
from shoal.sharding.memory_limits import memory_headroom
from shoal.spec.seeds import derive_seed
from shoal.strategies.self_check.hidden_state import (
    differing_attributes,
    differing_optimizer_attributes,
    saved_objects,
)
from shoal.strategies.self_check.module_data import ModuleData, user_modules
from shoal.tasks.task import Task

Rebuild = Callable[[], tuple[Task, Replica]]
"""Builds the job's task and replica, as at the start of the run."""
COPIES_NEEDED = 3
"""Memory for a check, in copies of the state: the second replica, its gradients, and the total."""
MAX_NAMES = 5
SETTING = "a setting of the optimizer or the schedule"


class SharedObjectsError(Exception):
    """What should be new is what the run trains."""


@dataclass(frozen=True)
class Recomputed:
    """Digests of a lane that was computed twice in a row and of its batch, and what differs after the update."""

    sums: list[str] = field(default_factory=list)
    batch: str = ""
    update_differs: list[str] = field(default_factory=list)


class Recorder:
    """A LaneObserver that keeps digests of one lane of one step, and a copy of the total if `keep_total`."""

    def __init__(self, step: int, lane: int, *, replica: Replica, keep_total: bool) -> None:
        self._step, self._lane = step, lane
        self._replica, self._keep_total = replica, keep_total
        self.lane_sum = self.batch = self.failure = ""
        self.total: LaneSum | None = None

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """A block in which the replica takes the step."""
        self._replica.observer = self
        try:
            yield
        finally:
            self._replica.observer = None

    def lane_computed(self, step: int, lane: int, batch: Any, result: LaneSum) -> None:
        if (step, lane) == (self._step, self._lane) and not self.lane_sum:
            try:
                self.lane_sum, self.batch = lane_sha256(self._replica, lane, result), batch_sha256(batch)
            except ShoalError as problem:
                self.failure = f"a gradient has no digest: {problem.message}"

    def total_scaled(self, step: int, total: LaneSum) -> None:
        if self._keep_total:
            self.total = copy_of_total(total)


class FreshObjects:
    """A task and a replica that nothing has used yet, with the state that `own_task` and `own` have now.

    They find the data of the user's modules as it was `at_start`. Belongs to the training thread. The global generators
    and the data of the user's modules stay as they are.
    """

    def __init__(self, rebuild: Rebuild, own_task: Task, own: Replica, *, at_start: ModuleData, step: int) -> None:
        self._own_task, self._own, self._at_start, self._step = own_task, own, at_start, step
        self._changed_modules: list[str] = []
        self._lanes_change_settings = False
        state, task_state = copied(own.state()), copied(own_task.state())
        with self._undisturbed():
            self.task, self.replica = rebuild()
            if self.task is own_task or _share_memory(own, self.replica):
                own.load_state(state)  # building it has given it the initial weights
                own_task.load_state(task_state)
                raise SharedObjectsError("the job's code returns the same model or task each time")
            self.replica.load_state(state)
            self.task.load_state(task_state)

    def compute_again(self, lane: int, batch: Batch | None, share: float, recorder: Recorder) -> Recomputed:
        """Compute the lane, and make the update of the recorded step. A lane without samples has no batch."""
        sums, digest = ([], "") if batch is None else self._compute_twice(lane, batch, share)
        return Recomputed(sums, digest, self._differences_after_update(recorder.total) if recorder.total else [])

    def _compute_twice(self, lane: int, batch: Batch, share: float) -> tuple[list[str], str]:
        sums, digest = [], ""
        with self._undisturbed():
            settings = settings_of(self.replica)
            for attempt in (batch, copy.deepcopy(batch)):
                self.replica.begin_step()
                result = self.replica.forward_backward(self._step, lane, attempt.to(self.replica.device), share=share)
                sums.append(lane_sha256(self.replica, lane, result))
                self.replica.undo_step()
                digest = digest or batch_sha256(attempt)
            self._lanes_change_settings = settings_of(self.replica) != settings
        return sums, digest

    def _differences_after_update(self, total: LaneSum) -> list[str]:
        with self._undisturbed():
            self.replica.begin_step()
            self.replica.apply_gradient(self._step, total)
            return self._differences()

    def _differences(self) -> list[str]:
        """The parts of the state that differ from the training replica's. What lanes carry on is compared by lane."""
        own, fresh = ({k: v for k, v in one.state().items() if k != "carry"} for one in (self._own, self.replica))
        differing = _differing_parts(own, fresh)[:MAX_NAMES]
        return differing or ([f"{SETTING}, which each lane changes"] if self._lanes_change_settings else [])

    def hidden_state(self) -> list[str]:
        """Paths of objects that differ from the training objects, and of module data that computing has changed."""
        own, fresh = self._own, self.replica
        seen = saved_objects(own.model, own.moving_buffers.names)
        names = [*self._changed_modules]
        names += differing_attributes(own.model, fresh.model, name="model", seen=seen)
        for one, other in zip(own.every_optimizer, fresh.every_optimizer, strict=True):
            names += differing_optimizer_attributes(one, other, seen=seen)
        names += differing_attributes(self._own_task, self.task, name="task", seen=seen)
        return list(dict.fromkeys(names))[:MAX_NAMES]

    def release(self) -> None:
        """Free the memory now. Optimizer and schedule refer to each other, and a garbage collection may be far away."""
        for optimizer in self.replica.every_optimizer:
            optimizer.state.clear()
        for parameter in self.replica.trainable:
            parameter.data = parameter.data.new_empty(0)

    @contextlib.contextmanager
    def _undisturbed(self) -> Iterator[None]:
        """Restore what the user's code shares between the training objects and these."""
        data = module_data(self._own_task, self._own)
        try:
            data.restore_earlier(self._at_start)
            # Another seed than any lane's: an update that draws random numbers must not draw the same ones by chance.
            with seeded_rng(derive_seed(self._step, 1)):
                yield
        finally:
            self._changed_modules += data.changed()
            data.restore()


def module_data(task: Task, replica: Replica) -> ModuleData:
    """The data of the modules whose code makes a step, as it is now."""
    return ModuleData(user_modules([task, *vars(task).values(), *replica.model.modules(), *replica.every_optimizer]))


def _share_memory(one: Replica, other: Replica) -> bool:
    ours = {p.untyped_storage().data_ptr() for p in one.trainable}
    return any(p.untyped_storage().data_ptr() in ours for p in other.trainable)


def uses_compiler() -> bool:
    """Has torch.compile compiled anything in this process? It would compile again for new objects, which takes long and
    may make it give up on the training objects."""
    utils = sys.modules.get("torch._dynamo.utils")
    return utils is not None and bool(utils.counters["frames"])


def missing_memory(replica: Replica, *, workers: int) -> str:
    """Why there is no room for a check by this many workers, or ''."""
    tensors, _ = flatten(replica.state())
    needed = COPIES_NEEDED * sum(t.numel() * t.element_size() for t in tensors.values())
    free = free_bytes(replica.device, workers=workers)
    return "" if needed <= free else f"it takes {needed >> 20} MiB of memory, and {free >> 20} are free"


def free_bytes(device: torch.device, *, workers: int) -> int:
    """A worker's share of the free memory. All of them may be on this machine; a GPU belongs to one."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(min(memory_headroom().values())) // workers


def fingerprint(tensor: Tensor) -> int:
    """A number that is the same for the same bits, at the speed of memory. Other bits may, rarely, have it too."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    flat = flat.clone() if flat.storage_offset() % 4 else flat
    whole = flat[: flat.numel() // 4 * 4].view(torch.int32).sum(dtype=torch.int64)
    return int(whole) + int(flat[flat.numel() // 4 * 4 :].sum(dtype=torch.int64))


def lane_sha256(replica: Replica, lane: int, result: LaneSum) -> str:
    """Of a lane that the replica has just computed: its sum, and what it carries on to the next step."""
    parts = {"grads": result.grads, "floats": result.float_buffers, "ints": result.int_buffers}
    carried = {"carried": replica.carry.new.get(lane)} if replica.carry else {}
    return state_sha256(parts | {"loss": result.loss, "count": result.count} | carried)


def settings_of(replica: Replica) -> Any:
    """The part of a replica's state that is no tensor."""
    return copy.deepcopy(flatten(replica.state())[1])


def batch_sha256(batch: Batch) -> str:
    """'' if a batch has values that have no digest."""
    try:
        return state_sha256([batch.inputs, batch.target])
    except ShoalError:
        return ""


def copied(state: State) -> State:
    """The state as a checkpoint would give it back."""
    tensors, skeleton = flatten(state)
    return unflatten({name: tensor.detach().clone() for name, tensor in tensors.items()}, skeleton)


def copy_of_total(total: LaneSum) -> LaneSum:
    def copies(tensors: list[Tensor]) -> list[Tensor]:
        return [tensor.detach().clone() for tensor in tensors]

    buffers = copies(total.float_buffers), copies(total.int_buffers)
    return replace(
        total, grads=copies(total.grads), float_buffers=buffers[0], int_buffers=buffers[1], loss=total.loss.clone()
    )


def _differing_parts(one: State, other: State) -> list[str]:
    (left, left_plain), (right, right_plain) = flatten(one), flatten(other)
    names = [
        name
        for name in dict.fromkeys([*left, *right])
        if name not in left or name not in right or bytes_of(left[name]) != bytes_of(right[name])
    ]
    found = [name.strip("/").replace("/", ".") for name in names]
    return found or ([SETTING] if left_plain != right_plain else [])
