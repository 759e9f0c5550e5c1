"""A value of a job as the space writes it: a job has every field of a section, an option only those that it sets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from shoal.spec.search.rules import holds
from shoal.spec.search.space import Choice, Range, range_or_choice

OUTSIDE = object()
"""In place of a value that is not in the space; None is one."""
_NAMES = ("name", "kind")
"""Sections that may be written as a single word."""


def in_words_of(values: Range | Choice, own: Any) -> Any:
    """The option or number that a job's own value stands for, or `OUTSIDE`. Of several options the one that says most
    about it."""
    if isinstance(values, Range):
        return own if holds(values, own) else OUTSIDE
    found = [(_said(option.value), _filled(option.value, own)) for option in values.options]
    inside = [(said, value) for said, value in found if value is not OUTSIDE]
    return max(inside, key=lambda one: one[0])[1] if inside else OUTSIDE


def _filled(option: Any, own: Any) -> Any:
    """The option with the job's own numbers in its ranges."""
    nested = range_or_choice(option)
    if nested is not None:
        return in_words_of(nested, own)
    if isinstance(option, str) and isinstance(own, dict):
        return option if option in (own.get(name) for name in _NAMES) and not own.get("args") else OUTSIDE
    if isinstance(option, Mapping):
        parts = {key: _filled(part, own.get(key) if isinstance(own, dict) else OUTSIDE) for key, part in option.items()}
        return OUTSIDE if any(part is OUTSIDE for part in parts.values()) else parts
    if isinstance(option, list):
        if not isinstance(own, list) or len(own) != len(option):
            return OUTSIDE
        items = [_filled(part, other) for part, other in zip(option, own, strict=True)]
        return OUTSIDE if any(item is OUTSIDE for item in items) else items
    return option if option == own and isinstance(option, bool) == isinstance(own, bool) else OUTSIDE


def _said(option: Any) -> int:
    """How many plain values an option sets."""
    if isinstance(option, Mapping):
        return sum(map(_said, option.values()))
    return sum(map(_said, option)) if isinstance(option, Sequence) and not isinstance(option, str) else 1
