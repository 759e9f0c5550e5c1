"""What fuzzers of ports and files share: Hypothesis strategies for values that look right and are not, and mutations of
valid messages. Everything is derived from Hypothesis' own seed, so an example is repeated by its printed blob.

    json_values         any JSON value, also NaN, Infinity, huge numbers, long texts and deep nesting
    mutated(message)    a valid JSON object with one or a few fields removed, added, replaced, swapped or nested
    damaged(data)       valid bytes with bits flipped, pieces cut out, doubled, inserted, or the end missing
    raw_bytes           bytes that follow no grammar
"""

import copy

from hypothesis import strategies as st

NASTY_NUMBERS = (
    -1, 0, 1, -(2**31), 2**31, 2**32, 2**40, 2**53, 2**63, -(2**63) - 1, 2**64, 10**400, 0.5, -0.0,
    1e308, -1e308, 5e-324, float("inf"), float("-inf"), float("nan"),
)  # fmt: skip
NASTY_TEXTS = (
    "", "0", "-1", "worker-0", "../../etc/passwd", "\0", "\x1b[2J\x1b]0;title\x07", "\u202e", "\ud800", "a" * 300,
    "x" * 70_000, "{}", "null", "NaN", "1e999",
)  # fmt: skip
LEVELS = 8
"""Objects and lists inside each other that mutations look into. No message has more."""
scalars = st.one_of(
    st.none(), st.booleans(), st.sampled_from(NASTY_NUMBERS), st.integers(), st.floats(),
    st.sampled_from(NASTY_TEXTS), st.text(max_size=20),
)  # fmt: skip
json_values = st.recursive(
    scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=8), inner, max_size=4)),
    max_leaves=8,
)
raw_bytes = st.one_of(
    st.binary(max_size=200),
    st.sampled_from(
        (b"\n", b"\0" * 1000, b"[" * 5000, b'{"a":' * 5000, b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01" * 9)
    ),
)


def deeply_nested(depth):
    """A value that breaks parsers that call themselves."""
    value = 0
    for _ in range(depth):
        value = [value]
    return value


@st.composite
def mutated(draw, message, *, at_most=3):
    """The object after one to `at_most` mutations somewhere inside it."""
    found = copy.deepcopy(message)
    for _ in range(draw(st.integers(1, at_most))):
        _mutate(draw, draw(st.sampled_from(_containers(found))))
    return found


def _containers(value, levels=LEVELS):
    """The objects and lists in a value, itself first, down to as many levels: one in the depth of a nested value says
    nothing new, and nesting it again would be too deep for the fuzzer itself."""
    inner = value.values() if isinstance(value, dict) else value
    parts = [part for part in inner if isinstance(part, dict | list)] if levels > 1 else []
    return [value, *(one for part in parts for one in _containers(part, levels - 1))]


def _mutate(draw, container):
    keys = list(container) if isinstance(container, dict) else list(range(len(container)))
    act = draw(st.sampled_from(("replace", "replace", "remove", "add", "swap", "nest")))
    if act == "add" or not keys:
        if isinstance(container, dict):
            container[draw(st.text(max_size=8))] = draw(json_values)
        else:
            container.append(draw(json_values))
        return
    key = draw(st.sampled_from(keys))
    if act == "replace":
        container[key] = draw(json_values)
    elif act == "remove":
        del container[key]
    elif act == "nest":
        container[key] = [container[key]] if draw(st.booleans()) else deeply_nested(draw(st.integers(2, 900)))
    else:
        other = draw(st.sampled_from(keys))
        container[key], container[other] = container[other], container[key]


@st.composite
def damaged(draw, data, *, at_most=3):
    """The bytes after one to `at_most` kinds of damage."""
    found = bytearray(data)
    for _ in range(draw(st.integers(1, at_most))):
        at = draw(st.integers(0, max(len(found) - 1, 0)))
        act = draw(st.sampled_from(("flip", "cut", "double", "insert", "end")))
        if act == "flip" and found:
            found[at] ^= 1 << draw(st.integers(0, 7))
        elif act == "cut":
            del found[at : at + draw(st.integers(1, 20))]
        elif act == "double":
            found[at:at] = found[at : at + draw(st.integers(1, 50))]
        elif act == "insert":
            found[at:at] = draw(st.binary(min_size=1, max_size=20))
        else:
            del found[at:]
    return bytes(found)
