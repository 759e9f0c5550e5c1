"""A state as named tensors and a JSON skeleton, and back: exact, and without pickle.

Names are JSON pointers (`/model/0.weight`). In the skeleton None, bool, int, finite floats, text and lists stand for
themselves. Anything else is an object with one key: `tensor`, `float`, `tuple` or `dict` (a list of pairs).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from shoal.checkpoint.tensor_bytes import unsaveable_reason
from shoal.errors import ShoalError, error

State = Any
Skeleton = Any

MAX_DEPTH = 100
_MAX_INT_BITS = 8192


def flatten(state: State) -> tuple[dict[str, Tensor], Skeleton]:
    """The tensors of a state by name (not copies), and its skeleton.

    Tensors are values: two that share memory are restored as two equal tensors. SH506 names what cannot be saved.
    """
    tensors: dict[str, Tensor] = {}
    return tensors, _encode(state, "", tensors, MAX_DEPTH)


def unflatten(tensors: Mapping[str, Tensor], skeleton: Skeleton) -> State:
    """The inverse of `flatten`. SH502 if the skeleton is invalid or names a tensor that is missing."""
    return _rebuild(skeleton, tensors.__getitem__)


def tensor_names(skeleton: Skeleton) -> list[str]:
    """The names that a skeleton, or a part of one, refers to."""
    names: list[str] = []
    _rebuild(skeleton, names.append)
    return names


def subtree(skeleton: Skeleton, key: str) -> Skeleton | None:
    """The skeleton under a key of the outermost dict; None if there is none."""
    if isinstance(skeleton, dict) and isinstance(pairs := skeleton.get("dict"), list):
        return next((pair[1] for pair in pairs if isinstance(pair, list) and len(pair) == 2 and pair[0] == key), None)
    return None


def _encode(node: Any, path: str, tensors: dict[str, Tensor], depth: int) -> Skeleton:
    if depth == 0:
        raise _unsaveable(path, "nested too deeply")
    if isinstance(node, Tensor):
        if reason := unsaveable_reason(node):
            raise _unsaveable(path, reason)
        tensors[path] = node
        return {"tensor": path}
    if isinstance(node, Mapping):
        names = _child_paths(node, path)
        return {"dict": [[k, _encode(v, names[k], tensors, depth - 1)] for k, v in node.items()]}
    if type(node) is list or type(node) is tuple:
        items = [_encode(v, f"{path}/{i}", tensors, depth - 1) for i, v in enumerate(node)]
        return items if type(node) is list else {"tuple": items}
    return _encode_scalar(node, path)


def _encode_scalar(node: Any, path: str) -> Skeleton:
    if type(node) is float:
        return node if math.isfinite(node) else {"float": str(node)}
    if type(node) is int and node.bit_length() > _MAX_INT_BITS:
        raise _unsaveable(path, f"a whole number of more than {_MAX_INT_BITS} bits")
    if node is None or type(node) in (bool, int, str):
        return node
    raise _unsaveable(path, f"of type {type(node).__module__}.{type(node).__qualname__}")


def _child_paths(node: Mapping[Any, Any], path: str) -> dict[Any, str]:
    """The path of each key. If a dict has both 0 and '0' as keys, the number is written `~i0`."""
    names: dict[str | int, str] = {}
    for key in node:
        if type(key) is str:
            names[key] = f"{path}/{key.replace('~', '~0').replace('/', '~1')}"
        elif type(key) is int:
            names[key] = f"{path}/~i{key}" if str(key) in node else f"{path}/{key}"
        else:
            raise _unsaveable(path, f"a dict with a key of type {type(key).__name__}")
    return names


def _unsaveable(path: str, what: str) -> ShoalError:
    return error("SH506", f"cannot be saved: {what}", where=f"state{path}")


def _rebuild(skeleton: Skeleton, tensor: Callable[[str], Any]) -> State:
    try:
        return _decode(skeleton, tensor, MAX_DEPTH)
    except (KeyError, TypeError, ValueError, OverflowError) as problem:
        raise error("SH502", f"the state's skeleton is damaged: {problem}") from None


def _decode(node: Skeleton, tensor: Callable[[str], Any], depth: int) -> State:
    if depth == 0:
        raise ValueError("it is nested too deeply")
    if isinstance(node, list):
        return [_decode(item, tensor, depth - 1) for item in node]
    if not isinstance(node, dict):
        return node
    ((tag, value),) = node.items()
    if tag == "tensor" and isinstance(value, str):
        return tensor(value)
    if tag == "float":
        return float(value)
    if tag == "tuple":
        return tuple(_decode(item, tensor, depth - 1) for item in value)
    if tag == "dict":
        return {key: _decode(item, tensor, depth - 1) for key, item in value}
    raise ValueError(f"{tag!r} is not known here")
