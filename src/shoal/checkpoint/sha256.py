"""One SHA-256 for a set of weights or a whole state: equal exactly if every name, type, shape and bit is."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from shoal.checkpoint.state_tree import Skeleton, State, flatten
from shoal.checkpoint.tensor_bytes import bytes_of


def weights_sha256(named_tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 over name, dtype, shape and little-endian values of each tensor, in the order of names."""
    return _hash_tensors(hashlib.sha256(), named_tensors)


def state_sha256(state: State) -> str:
    """SHA-256 of any state that `flatten` accepts. The order of a dict's keys does not matter."""
    tensors, skeleton = flatten(state)
    text = json.dumps(_sort_dict_keys(skeleton), sort_keys=True, separators=(",", ":"))
    return _hash_tensors(hashlib.sha256(text.encode("ascii")), tensors)


def _hash_tensors(sha256: Any, named_tensors: Mapping[str, Tensor]) -> str:
    for name in sorted(named_tensors):
        tensor = named_tensors[name]
        head = [name, str(tensor.dtype), list(tensor.shape)]
        sha256.update(json.dumps(head).encode("ascii"))
        sha256.update(bytes_of(tensor))
    return str(sha256.hexdigest())


def _sort_dict_keys(skeleton: Skeleton) -> Skeleton:
    """The same skeleton, with the pairs of every dict sorted by type and value of their keys."""
    if isinstance(skeleton, list):
        return [_sort_dict_keys(item) for item in skeleton]
    if not isinstance(skeleton, dict):
        return skeleton
    ((tag, value),) = skeleton.items()
    if tag == "dict":
        return {tag: sorted(([k, _sort_dict_keys(v)] for k, v in value), key=lambda pair: json.dumps(pair[0]))}
    return {tag: _sort_dict_keys(value)}
