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

Handover = Callable[[str, Tensor], None]
META = torch.device("meta")
_OF_DATA = (torch.tensor, torch.as_tensor, torch.asarray)
_aten = torch.ops.aten
_OVERWRITES = {_aten.uniform_, _aten.normal_, _aten.random_, _aten.exponential_, _aten.log_normal_, _aten.cauchy_} | {
    _aten.fill_,
    _aten.zero_,
    _aten.copy_,
}


class Blueprint:
    """`model` has its shapes and no memory. `why_whole`, if not '', tells why the model was made in full after all."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        self._generator = torch.get_rng_state()
        self._acts: list[_Act] = []
        self.why_whole = ""
        try:
            with _truncating(self._acts), _Making(), _Recorder(self._acts):
                self.model = make()
            if not torch.equal(torch.get_rng_state(), self._generator):
                self.why_whole = "making the model draws numbers that cannot be put off"
        except (NotImplementedError, RuntimeError) as problem:
            self.why_whole = f"making the model needs values: {str(problem).splitlines()[0]}"
        # Noted now: whoever cuts the model puts other tensors into it.
        named = {} if self.why_whole else named_tensors(self.model)
        self._wanted = {name: _Spot.of(tensor) for name, tensor in named.items() if tensor.is_meta}
        self._known = {name: tensor.detach() for name, tensor in named.items() if not tensor.is_meta}
        self._real: nn.Module | None = None
        if self.why_whole:
            torch.set_rng_state(self._generator)
            self._real = make()
            self.model = _emptied(self._real)
        elif self._known:
            _empty(self.model)

    def play(self, take: Handover) -> None:
        """Give every parameter and buffer to `take`, once, under its first name. It must copy what it needs. Leaves the
        generator as making the model would have."""
        if self._real is not None:
            for name, tensor in named_tensors(self._real).items():
                take(name, tensor)
            self._real = None
            return
        torch.set_rng_state(self._generator)
        for name, tensor in self._known.items():
            take(name, tensor)
        with torch.no_grad():
            _play(self._acts, self._wanted, take)


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers, each once, by full names."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _emptied(model: nn.Module) -> nn.Module:
    """The same without memory; what was tied stays tied, as deepcopy keeps it."""
    memo: dict[int, Any] = {id(tensor): _like(tensor) for tensor in [*model.parameters(), *model.buffers()]}
    return copy.deepcopy(model, memo)


def _empty(model: nn.Module) -> None:
    """Take out the tensors that have memory (with values that numpy or a file has brought), and put others in their
    places that have none; what was tied stays tied."""
    made: dict[int, Tensor] = {}
    for module in model.modules():
        for key, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is not None and not tensor.is_meta:
                if id(tensor) not in made:
                    made[id(tensor)] = _like(tensor)
                setattr(module, key, made[id(tensor)])


def _like(tensor: Tensor) -> Tensor:
    """Without memory."""
    empty = torch.empty_like(tensor, device=META, requires_grad=False)
    return nn.Parameter(empty, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


# ---- writing down ----


@dataclass(frozen=True)
class _Spot:
    """A tensor as a place in a storage."""

    storage: torch.UntypedStorage
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: Tensor) -> _Spot:
        return cls(tensor.untyped_storage(), tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    @property
    def key(self) -> int:
        return int(self.storage._cdata)

    @property
    def fills(self) -> bool:
        """Does it cover all of its storage?"""
        return self.shape.numel() * self.dtype.itemsize == self.storage.nbytes()

    def within(self, real: torch.UntypedStorage) -> Tensor:
        return torch.empty(0, dtype=self.dtype).set_(real, self.offset, self.shape, self.stride)

    def scratch(self) -> Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype)


@dataclass(frozen=True)
class _Act:
    """One operation; its tensors are spots, or real ones whose values are known. `overwrites`: nothing is left of what
    its first argument was before. `draws`: the generator moves on."""

    act: Any
    args: Any
    kwargs: Any
    made: tuple[_Spot, ...]
    changed: tuple[_Spot, ...]
    overwrites: bool
    draws: bool

    @property
    def spots(self) -> list[_Spot]:
        return [leaf for leaf in pytree.tree_leaves((self.args, self.kwargs)) if isinstance(leaf, _Spot)]

    @property
    def only_draws(self) -> bool:
        """Can it be done on any other memory, if its values are not needed?"""
        return self.draws and self.overwrites


class OnMeta(TorchFunctionMode):
    """While `on`, whatever is made without saying where is made on the meta device. Values that Python brings are
    kept."""

    def __init__(self, *, on: bool = True) -> None:
        super().__init__()
        self.on = on

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self.on or kwargs.get("device") is not None:
            return func(*args, **kwargs)
        if func in _OF_DATA:
            return func(*args, **kwargs).to(META)
        return func(*args, **(kwargs | {"device": META} if func in _device_constructors() else kwargs))


class _Making(OnMeta):
    """For a model's constructor, that must not know: where torch's initialisers see that a tensor has no memory, they
    leave out their arithmetic without a word."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == Tensor.is_meta.__get__:  # type: ignore[attr-defined]
            return False
        return super().__torch_function__(func, types, args, kwargs)


@contextlib.contextmanager
def _truncating(acts: list[_Act]) -> Iterator[None]:
    """torch draws truncated normals until all fit, and looks at them in between: that is one operation here."""
    original = init._no_grad_trunc_normal_

    def note(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if tensor.device != META:
            return original(tensor, *args, **kwargs)
        spot = _Spot.of(tensor)
        acts.append(_Act(original, (spot, *args), kwargs, (), (spot,), overwrites=spot.fills, draws=True))
        return tensor

    init._no_grad_trunc_normal_ = note
    try:
        yield
    finally:
        init._no_grad_trunc_normal_ = original


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, acts: list[_Act]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._acts = acts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        given = {_Spot.of(t).key for t in _on_meta((args, kwargs))}
        results = [_Spot.of(t) for t in _on_meta(out)]
        made = tuple(spot for spot in results if spot.key not in given)
        changed = tuple(_changed(func, args, kwargs))
        if made or changed:
            overwrites = func.overloadpacket in _OVERWRITES and changed[0].fills
            draws = torch.Tag.nondeterministic_seeded in func.tags
            self._acts.append(_Act(func, _kept(args), _kept(kwargs), made, changed, overwrites, draws))
        return out


def _on_meta(values: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor) and leaf.device == META]


def _changed(func: Any, args: Any, kwargs: Any) -> Iterable[_Spot]:
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[number] if number < len(args) else kwargs.get(argument.name)
            yield from map(_Spot.of, _on_meta(value))


def _kept(values: Any) -> Any:
    def keep(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return _Spot.of(leaf) if leaf.device == META else leaf.detach().clone()

    return pytree.tree_map(keep, values)


# ---- playing back ----


def _play(acts: list[_Act], wanted: dict[str, _Spot], take: Handover) -> None:
    needed = _needed(acts, {spot.key for spot in wanted.values()})
    last = {spot.key: i for i in sorted(needed) for spot in (*acts[i].spots, *acts[i].made)}
    real: dict[int, torch.UntypedStorage] = {}
    for i, act in enumerate(acts):
        if i not in needed:
            if act.draws:
                _throw_away(act)
            continue
        out = act.act(*_real(act.args, real), **_real(act.kwargs, real))
        results = [t for t in pytree.tree_leaves(out) if isinstance(t, Tensor)]
        if act.made:
            real.update({spot.key: t.untyped_storage() for spot, t in zip(act.made, results, strict=True)})
        done = {spot.key for spot in (*act.spots, *act.made) if last[spot.key] == i}
        for name, spot in wanted.items():
            if spot.key in done:
                take(name, spot.within(real[spot.key]))
        for key in done:
            real.pop(key, None)


def _needed(acts: list[_Act], live: set[int]) -> set[int]:
    """The acts that a tensor's last values depend on."""
    needed = set()
    for i in range(len(acts) - 1, -1, -1):
        act = acts[i]
        written = {spot.key for spot in (*act.made, *act.changed)}
        if not written & live and (act.only_draws or not act.draws):
            continue
        needed.add(i)
        live -= {spot.key for spot in act.made}
        read = {spot.key for spot in act.spots}
        if act.overwrites:
            target = act.args[0].key
            live.discard(target)
            others = [leaf for leaf in pytree.tree_leaves((act.args[1:], act.kwargs)) if isinstance(leaf, _Spot)]
            read = {spot.key for spot in others}
        live |= read
    return needed


def _throw_away(act: _Act) -> None:
    """Only the generator moves on."""
    act.act(act.args[0].scratch(), *act.args[1:], **act.kwargs)


def _real(values: Any, real: dict[int, torch.UntypedStorage]) -> Any:
    def find(leaf: Any) -> Any:
        if isinstance(leaf, _Spot):
            if leaf.key not in real:
                real[leaf.key] = torch.UntypedStorage(leaf.storage.nbytes())  # type: ignore[no-untyped-call]
            return leaf.within(real[leaf.key])
        return torch.device("cpu") if isinstance(leaf, torch.device) and leaf == META else leaf

    return pytree.tree_map(find, values)
