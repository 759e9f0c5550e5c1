"""A model without memory, and its first weights tensor by tensor: nobody ever holds the whole.

The model is made on the meta device while every operation on its tensors is written down. Played back on the real
device, in the same order and from the same state of the generator, they give the same bits as making the model there.
What is overwritten later is drawn and thrown away; each tensor is handed over as soon as nothing needs it any more.
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
    """`model` has its shapes and no memory. `why_whole`, if not '', tells why the model was made in full after all."""

    def __init__(self, make_model: Callable[[], nn.Module]) -> None:
        self._rng_state = torch.get_rng_state()
        self._operations: list[_RecordedOperation] = []
        self.why_not_deferred = ""
        try:
            with _record_trunc_normal(self._operations), _ConstructionMode(), _OperationRecorder(self._operations):
                self.model = make_model()
            if not torch.equal(torch.get_rng_state(), self._rng_state):
                self.why_not_deferred = "making the model draws numbers that cannot be put off"
        except (NotImplementedError, RuntimeError) as problem:
            self.why_not_deferred = f"making the model needs values: {str(problem).splitlines()[0]}"
        # Noted now: whoever cuts the model puts other tensors into it.
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
        """Give every parameter and buffer to `take`, once, under its first name. It must copy what it needs. Leaves the
        generator as making the model would have."""
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
    """Parameters and buffers, each once, by full names."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _meta_copy(model: nn.Module) -> nn.Module:
    """The same without memory; what was tied stays tied, as deepcopy keeps it."""
    memo: dict[int, Any] = {id(tensor): _meta_like(tensor) for tensor in [*model.parameters(), *model.buffers()]}
    return copy.deepcopy(model, memo)


def _move_to_meta(model: nn.Module) -> None:
    """Take out the tensors that have memory (with values that numpy or a file has brought), and put others in their
    places that have none; what was tied stays tied."""
    made: dict[int, Tensor] = {}
    for module in model.modules():
        for key, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is not None and not tensor.is_meta:
                if id(tensor) not in made:
                    made[id(tensor)] = _meta_like(tensor)
                setattr(module, key, made[id(tensor)])


def _meta_like(tensor: Tensor) -> Tensor:
    """Without memory."""
    empty = torch.empty_like(tensor, device=META, requires_grad=False)
    return nn.Parameter(empty, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


# ---- writing down ----


@dataclass(frozen=True)
class _StorageView:
    """A tensor as a place in a storage."""

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
        """Does it cover all of its storage?"""
        return self.shape.numel() * self.dtype.itemsize == self.storage.nbytes()

    def materialised_in(self, real: torch.UntypedStorage) -> Tensor:
        return torch.empty(0, dtype=self.dtype).set_(real, self.offset, self.shape, self.stride)

    def scratch_tensor(self) -> Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype)


@dataclass(frozen=True)
class _RecordedOperation:
    """One operation; its tensors are spots, or real ones whose values are known. `overwrites`: nothing is left of what
    its first argument was before. `draws`: the generator moves on."""

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
        """Can it be done on any other memory, if its values are not needed?"""
        return self.uses_rng and self.overwrites


class MetaDeviceMode(TorchFunctionMode):
    """While `on`, whatever is made without saying where is made on the meta device. Values that Python brings are
    kept."""

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
    """For a model's constructor, that must not know: where torch's initialisers see that a tensor has no memory, they
    leave out their arithmetic without a word."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == Tensor.is_meta.__get__:  # type: ignore[attr-defined]
            return False
        return super().__torch_function__(func, types, args, kwargs)


@contextlib.contextmanager
def _record_trunc_normal(operations: list[_RecordedOperation]) -> Iterator[None]:
    """torch draws truncated normals until all fit, and looks at them in between: that is one operation here."""
    original = init._no_grad_trunc_normal_

    def note(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if tensor.device != META:
            return original(tensor, *args, **kwargs)
        spot = _StorageView.of(tensor)
        operations.append(
            _RecordedOperation(
                original, (spot, *args), kwargs, (), (spot,), overwrites=spot.covers_storage, uses_rng=True
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
        made = tuple(spot for spot in results if spot.storage_id not in given)
        changed = tuple(_mutated_views(func, args, kwargs))
        if made or changed:
            overwrites = func.overloadpacket in _OVERWRITING_OPS and changed[0].covers_storage
            draws = torch.Tag.nondeterministic_seeded in func.tags
            self._operations.append(
                _RecordedOperation(
                    func, _recorded_values(args), _recorded_values(kwargs), made, changed, overwrites, draws
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


# ---- playing back ----


def _replay(operations: list[_RecordedOperation], targets: dict[str, _StorageView], on_tensor: OnTensor) -> None:
    needed = _needed_operations(operations, {spot.storage_id for spot in targets.values()})
    last = {spot.storage_id: i for i in sorted(needed) for spot in (*operations[i].inputs, *operations[i].created)}
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
                {spot.storage_id: t.untyped_storage() for spot, t in zip(operation.created, results, strict=True)}
            )
        done = {spot.storage_id for spot in (*operation.inputs, *operation.created) if last[spot.storage_id] == i}
        for name, spot in targets.items():
            if spot.storage_id in done:
                on_tensor(name, spot.materialised_in(storages[spot.storage_id]))
        for key in done:
            storages.pop(key, None)


def _needed_operations(operations: list[_RecordedOperation], live: set[int]) -> set[int]:
    """The acts that a tensor's last values depend on."""
    needed = set()
    for i in range(len(operations) - 1, -1, -1):
        operation = operations[i]
        written = {spot.storage_id for spot in (*operation.created, *operation.mutated)}
        if not written & live and (operation.only_advances_rng or not operation.uses_rng):
            continue
        needed.add(i)
        live -= {spot.storage_id for spot in operation.created}
        read = {spot.storage_id for spot in operation.inputs}
        if operation.overwrites:
            target = operation.args[0].storage_id
            live.discard(target)
            others = [
                leaf
                for leaf in pytree.tree_leaves((operation.args[1:], operation.kwargs))
                if isinstance(leaf, _StorageView)
            ]
            read = {spot.storage_id for spot in others}
        live |= read
    return needed


def _advance_rng(operation: _RecordedOperation) -> None:
    """Only the generator moves on."""
    operation.func(operation.args[0].scratch_tensor(), *operation.args[1:], **operation.kwargs)


def _materialised(values: Any, storages: dict[int, torch.UntypedStorage]) -> Any:
    def find(leaf: Any) -> Any:
        if isinstance(leaf, _StorageView):
            if leaf.storage_id not in storages:
                storages[leaf.storage_id] = torch.UntypedStorage(leaf.storage.nbytes())  # type: ignore[no-untyped-call]
            return leaf.materialised_in(storages[leaf.storage_id])
        return torch.device("cpu") if isinstance(leaf, torch.device) and leaf == META else leaf

    return pytree.tree_map(find, values)
