"""Events of every kind with fields of the right types, and rows that are damaged in one way or another."""

import json
import types
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints, is_typeddict

from hypothesis import strategies as st

from shoal.events import Event
from shoal.events.checks import is_count, is_number
from shoal.events.schema import FORMER_KINDS, KINDS, to_row

MEMBERS = [f"worker-{n}" for n in range(3)] + [f"server-{n}" for n in range(3, 5)]
NAMES = st.sampled_from([*MEMBERS, "driver", "validation", "test", "loss", "accuracy", "", "\N{FISH}", "\ud800"])
COUNTS = st.one_of(st.integers(0, 20), st.integers(0, 2**63 - 1))
FINITE = st.one_of(st.floats(0, 10), st.floats(-1e300, 1e300), st.integers(0, 5))
PLAIN = {
    int: COUNTS,
    float: FINITE,
    str: NAMES,
    bool: st.booleans(),
    type(None): st.none(),
    Any: st.none() | st.integers(),
}


def values(hint):
    """Values of a type of the schema."""
    origin, arguments = get_origin(hint), get_args(hint)
    if is_count in arguments:
        return COUNTS
    if is_number in arguments:
        return FINITE | st.floats()
    if origin is Annotated:
        return values(arguments[0])
    if origin in (Union, types.UnionType):
        return st.one_of(*map(values, arguments))
    if origin in (list, Sequence):
        return st.lists(values(arguments[0]), max_size=3)
    if origin in (dict, Mapping):
        return st.dictionaries(NAMES, values(arguments[1]), max_size=3)
    if is_typeddict(hint):
        hints = get_type_hints(hint, include_extras=True)
        required = {name: values(one) for name, one in hints.items() if name in hint.__required_keys__}
        optional = {name: values(one) for name, one in hints.items() if name not in hint.__required_keys__}
        return st.fixed_dictionaries(required, optional=optional)
    return PLAIN[hint]


def fields_of(kind):
    optional = kind.fields_class._field_defaults
    return st.fixed_dictionaries(
        {name: values(hint) for name, hint in kind.hints.items() if name not in optional},
        optional={name: values(hint) for name, hint in kind.hints.items() if name in optional},
    )


@cache
def events():
    """Any event that a stream may hold."""
    kinds = [kind for kind in KINDS.values() if kind.in_stream]
    return st.one_of(
        st.builds(
            Event,
            st.just(kind.name),
            st.floats(0, 1e10).map(lambda t: round(t, 6)),
            st.sampled_from(MEMBERS),
            st.none() | COUNTS,
            fields_of(kind),
        )
        for kind in kinds
    )


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@st.composite
def damaged_lines(draw):
    """A line of a stream to which something happened; sometimes nothing did."""
    row = to_row(draw(events()))
    how = draw(st.sampled_from(["sound", "value", "missing", "former", "cut", "bytes", "json"]))
    if how == "value":
        row[draw(st.sampled_from(sorted(row)))] = draw(ANYTHING)
    elif how == "missing":
        del row[draw(st.sampled_from(sorted(row)))]
    elif how == "former":
        row["kind"] = draw(st.sampled_from(sorted(FORMER_KINDS)))
    line = json.dumps(row).encode()
    if how == "cut":
        return line[: draw(st.integers(0, len(line)))]
    if how == "bytes":
        return draw(st.binary(max_size=40))
    return json.dumps(draw(ANYTHING)).encode() if how == "json" else line
