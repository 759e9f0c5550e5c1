"""Deferred (meta) initialisation: builds a model without memory, then its initial weights tensor by tensor.

The model is built on the meta device while every operation on its tensors is recorded. Replayed on the real device, in
the same order and from the same generator state, the operations give the same bits as building the model there. Values
that are overwritten later are drawn and discarded. Each tensor is delivered as soon as no later operation needs it, so
no process ever holds the whole model.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import init
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode

OnTensor = Callable[[str, Tensor], None]
META = torch.device("meta")
_DATA_CONSTRUCTORS = (torch.tensor, torch.as_tensor, torch.asarray)
_aten = torch.ops.aten
_OVERWRITING_OPS = {
    _aten.uniform_,
    _aten.normal_,
    _aten.random_,
    _aten.exponential_,
    _aten.log_normal_,
    _aten.cauchy_,
} | {
    _aten.fill_,
    _aten.zero_,
    _aten.copy_,
}


class DeferredInit:
    """`model` is on the meta device. `why_not_deferred`, if not '', says why the model had to be built in full."""

    def __init__(self, make_model: Callable[[], nn.Module]) -> None:
        self._rng_state = torch.get_rng_state()
        self._operations: list[_RecordedOperation] = []
        self.why_not_deferred = ""
        try:
            with _record_trunc_normal(self._operations), _ConstructionMode(), _OperationRecorder(self._operations):
                self.model = make_model()
            if not torch.equal(torch.get_rng_state(), self._rng_state):
                self.why_not_deferred = "building the model draws random numbers that cannot be deferred"
        except (NotImplementedError, RuntimeError) as problem:
            self.why_not_deferred = f"building the model needs values: {str(problem).splitlines()[0]}"
        # recorded now, because sharding replaces the model's tensors
        named = {} if self.why_not_deferred else named_tensors(self.model)
        self._targets = {name: _StorageView.of(tensor) for name, tensor in named.items() if tensor.is_meta}
        self._real_values = {name: tensor.detach() for name, tensor in named.items() if not tensor.is_meta}
        self._eager_model: nn.Module | None = None
        if self.why_not_deferred:
            torch.set_rng_state(self._rng_state)
            self._eager_model = make_model()
            self.model = _meta_copy(self._eager_model)
        elif self._real_values:
            _move_to_meta(self.model)

    def materialise(self, on_tensor: OnTensor) -> None:
        """Call `on_tensor` once for every parameter and buffer, with its first name. It must copy what it needs.
        Afterwards the generator's state is the same as after building the model."""
        if self._eager_model is not None:
            for name, tensor in named_tensors(self._eager_model).items():
                on_tensor(name, tensor)
            self._eager_model = None
            return
        torch.set_rng_state(self._rng_state)
        for name, tensor in self._real_values.items():
            on_tensor(name, tensor)
        with torch.no_grad():
            _replay(self._operations, self._targets, on_tensor)


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers, each once, by full name."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _meta_copy(model: nn.Module) -> nn.Module:
    """A copy on the meta device; deepcopy keeps tied tensors tied."""
    memo: dict[int, Any] = {id(tensor): _meta_like(tensor) for tensor in [*model.parameters(), *model.buffers()]}
    return copy.deepcopy(model, memo)


def _move_to_meta(model: nn.Module) -> None:
    """Replace tensors with memory (loaded from numpy or a file, say) by meta tensors; tied tensors stay tied."""
    created: dict[int, Tensor] = {}
    for module in model.modules():
        for key, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is not None and not tensor.is_meta:
                if id(tensor) not in created:
                    created[id(tensor)] = _meta_like(tensor)
                setattr(module, key, created[id(tensor)])


def _meta_like(tensor: Tensor) -> Tensor:
    """The same on the meta device."""
    empty = torch.empty_like(tensor, device=META, requires_grad=False)
    return nn.Parameter(empty, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


# ---- record ----


@dataclass(frozen=True)
class _StorageView:
    """A tensor as a view of a storage."""

    storage: torch.UntypedStorage
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: Tensor) -> _StorageView:
        return cls(tensor.untyped_storage(), tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    @property
    def storage_id(self) -> int:
        return int(self.storage._cdata)

    @property
    def covers_storage(self) -> bool:
        """Whether it covers all of its storage."""
        return self.shape.numel() * self.dtype.itemsize == self.storage.nbytes()

    def materialised_in(self, real: torch.UntypedStorage) -> Tensor:
        return torch.empty(0, dtype=self.dtype).set_(real, self.offset, self.shape, self.stride)

    def scratch_tensor(self) -> Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype)


@dataclass(frozen=True)
class _RecordedOperation:
    """One operation; its tensors are storage views, or real tensors with known values. `overwrites`: it replaces all
    values of its first argument. `uses_rng`: it advances the generator."""

    func: Any
    args: Any
    kwargs: Any
    created: tuple[_StorageView, ...]
    mutated: tuple[_StorageView, ...]
    overwrites: bool
    uses_rng: bool

    @property
    def inputs(self) -> list[_StorageView]:
        return [leaf for leaf in pytree.tree_leaves((self.args, self.kwargs)) if isinstance(leaf, _StorageView)]

    @property
    def only_advances_rng(self) -> bool:
        """Whether it can run on scratch memory if its values are not needed."""
        return self.uses_rng and self.overwrites


class MetaDeviceMode(TorchFunctionMode):
    """While `active`, tensors are created on the meta device unless a device is given. Values from Python data are
    evaluated first."""

    def __init__(self, *, active: bool = True) -> None:
        super().__init__()
        self.active = active

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self.active or kwargs.get("device") is not None:
            return func(*args, **kwargs)
        if func in _DATA_CONSTRUCTORS:
            return func(*args, **kwargs).to(META)
        return func(*args, **(kwargs | {"device": META} if func in _device_constructors() else kwargs))


class _ConstructionMode(MetaDeviceMode):
    """For a model's constructor, from which it hides the meta device: torch's initialisers silently skip their
    arithmetic on meta tensors."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == Tensor.is_meta.__get__:  # type: ignore[attr-defined]
            return False
        return super().__torch_function__(func, types, args, kwargs)


@contextlib.contextmanager
def _record_trunc_normal(operations: list[_RecordedOperation]) -> Iterator[None]:
    """Record a truncated normal as one operation: torch draws repeatedly and reads the values in between."""
    original = init._no_grad_trunc_normal_

    def note(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if tensor.device != META:
            return original(tensor, *args, **kwargs)
        view = _StorageView.of(tensor)
        operations.append(
            _RecordedOperation(
                original, (view, *args), kwargs, (), (view,), overwrites=view.covers_storage, uses_rng=True
            )
        )
        return tensor

    init._no_grad_trunc_normal_ = note
    try:
        yield
    finally:
        init._no_grad_trunc_normal_ = original


class _OperationRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, operations: list[_RecordedOperation]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._operations = operations

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        given = {_StorageView.of(t).storage_id for t in _meta_tensors((args, kwargs))}
        results = [_StorageView.of(t) for t in _meta_tensors(out)]
        created = tuple(view for view in results if view.storage_id not in given)
        mutated = tuple(_mutated_views(func, args, kwargs))
        if created or mutated:
            overwrites = func.overloadpacket in _OVERWRITING_OPS and mutated[0].covers_storage
            uses_rng = torch.Tag.nondeterministic_seeded in func.tags
            self._operations.append(
                _RecordedOperation(
                    func, _recorded_values(args), _recorded_values(kwargs), created, mutated, overwrites, uses_rng
                )
            )
        return out


def _meta_tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor) and leaf.device == META]


def _mutated_views(func: Any, args: Any, kwargs: Any) -> Iterable[_StorageView]:
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[number] if number < len(args) else kwargs.get(argument.name)
            yield from map(_StorageView.of, _meta_tensors(value))


def _recorded_values(values: Any) -> Any:
    def keep(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return _StorageView.of(leaf) if leaf.device == META else leaf.detach().clone()

    return pytree.tree_map(keep, values)


# ---- replay ----


def _replay(operations: list[_RecordedOperation], targets: dict[str, _StorageView], on_tensor: OnTensor) -> None:
    needed = _needed_operations(operations, {view.storage_id for view in targets.values()})
    last = {view.storage_id: i for i in sorted(needed) for view in (*operations[i].inputs, *operations[i].created)}
    storages: dict[int, torch.UntypedStorage] = {}
    for i, operation in enumerate(operations):
        if i not in needed:
            if operation.uses_rng:
                _advance_rng(operation)
            continue
        out = operation.func(*_materialised(operation.args, storages), **_materialised(operation.kwargs, storages))
        results = [t for t in pytree.tree_leaves(out) if isinstance(t, Tensor)]
        if operation.created:
            storages.update(
                {view.storage_id: t.untyped_storage() for view, t in zip(operation.created, results, strict=True)}
            )
        done = {view.storage_id for view in (*operation.inputs, *operation.created) if last[view.storage_id] == i}
        for name, view in targets.items():
            if view.storage_id in done:
                on_tensor(name, view.materialised_in(storages[view.storage_id]))
        for key in done:
            storages.pop(key, None)


def _needed_operations(operations: list[_RecordedOperation], live: set[int]) -> set[int]:
    """The operations on which the tensors' final values depend."""
    needed = set()
    for i in range(len(operations) - 1, -1, -1):
        operation = operations[i]
        written = {view.storage_id for view in (*operation.created, *operation.mutated)}
        if not written & live and (operation.only_advances_rng or not operation.uses_rng):
            continue
        needed.add(i)
        live -= {view.storage_id for view in operation.created}
        read = {view.storage_id for view in operation.inputs}
        if operation.overwrites:
            target = operation.args[0].storage_id
            live.discard(target)
            others = [
                leaf
                for leaf in pytree.tree_leaves((operation.args[1:], operation.kwargs))
                if isinstance(leaf, _StorageView)
            ]
            read = {view.storage_id for view in others}
        live |= read
    return needed


def _advance_rng(operation: _RecordedOperation) -> None:
    """Advance the generator as the operation would."""
    operation.func(operation.args[0].scratch_tensor(), *operation.args[1:], **operation.kwargs)


def _materialised(values: Any, storages: dict[int, torch.UntypedStorage]) -> Any:
    def find(leaf: Any) -> Any:
        if isinstance(leaf, _StorageView):
            if leaf.storage_id not in storages:
                storages[leaf.storage_id] = torch.UntypedStorage(leaf.storage.nbytes())  # type: ignore[no-untyped-call]
            return leaf.materialised_in(storages[leaf.storage_id])
        return torch.device("cpu") if isinstance(leaf, torch.device) and leaf == META else leaf

    return pytree.tree_map(find, values)
