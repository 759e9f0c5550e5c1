"""What may be said to a driver: the real messages of every process fit, and nothing else does."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.fleet import messages
from shoal.fleet.messages import printable
from shoal.net.errors import ProtocolError
from tests.fuzz.grammar import deeply_nested, json_values, mutated

ADDRESS = {"host": "127.0.0.1", "port": 4000, "host_id": "boot:1:2", "unix": "\0shoal"}
JOINED = {"managed": False, "can_save": False, "needs_job": True}
WORKER = {"role": "worker", "seat": None, "key": "", "agent": "", "attachment": JOINED, "pid": 7, "host": "h",
          "address": ADDRESS, "view": 0, "training": False, "table": None}  # fmt: skip
PARSERS = {
    "worker": messages.parse_worker_message,
    "server": messages.parse_server_message,
    "agent": messages.parse_agent_message,
    "user": messages.parse_user_request,
}
BEAT = {"phase": "compute", "step": 3, "units": 9, "units_in_phase": 4, "since_s": 0.25, "moved_bytes": 0,
        "lane_s": None, "line": "a.py:3 in f", "refused": 1, "served_bytes": 10, "leaving": True}  # fmt: skip
VALID = [
    ("worker", "beat", BEAT),
    ("worker", "standing", {"view": 3, "position": 14, "saved": True}),
    ("worker", "standing", {"view": 0, "position": None}),
    ("worker", "cuts", {"cuts": [0, 512, 4096]}),
    ("worker", "event", {"row": "{}"}),
    ("worker", "bye", {}),
    ("server", "beat", {"phase": "serving", "served": {"pushes": 3, "staleness_mean": 0.5}}),
    ("server", "filled", {"seat": 4, "table": 1001}),
    ("agent", "output", {"seat": 3, "text": "a line"}),
    ("agent", "exited", {"seat": 3, "code": -9, "reason": "SIGKILL", "errors": "Traceback"}),
    ("agent", "exited", {"seat": 3, "code": None, "reason": "an unknown cause", "errors": ""}),
    ("user", "scale", {"wanted": 3}),
    ("user", "drain", {"seat": 3, "role": "server"}),
    ("user", "stop", {}),
    ("user", "inspect", {"profile": None}),
    ("worker", "found", {"profile": "a1-2", "piece": "eA==", "is_last": False}),
]


@pytest.mark.parametrize(("role", "kind", "fields"), VALID)
def test_what_a_process_says_is_understood(role, kind, fields):
    found = PARSERS[role](kind, fields)
    assert found.kind == kind
    for name, value in fields.items():
        assert getattr(found, name) == value


@pytest.mark.parametrize(
    "wrong",
    [
        {"seat": -1}, {"seat": 2**40}, {"seat": True}, {"seat": 1.0}, {"seat": "1"}, {"pid": float("inf")},
        {"pid": 2**70}, {"pid": -1},
        {"host": "h" * 300}, {"host": None}, {"view": float("nan")}, {"view": 2**40}, {"training": 1},
        {"training": "yes"}, {"address": {**ADDRESS, "port": 70_000}}, {"address": {**ADDRESS, "port": "1"}},
        {"address": {**ADDRESS, "host": "h" * 300}}, {"address": {**ADDRESS, "more": 1}}, {"address": []},
        {"attachment": {**JOINED, "managed": "no"}}, {"attachment": {}}, {"table": {"number": 1}}, {"role": "boss"},
        {"role": ["worker"]}, {"role": {}}, {"more": 1}, {"key": 1}, {"key": deeply_nested(900)},
    ],
)  # fmt: skip
def test_a_greeting_with_a_wrong_field_is_refused_and_says_which(wrong):
    assert messages.parse_hello(WORKER)
    with pytest.raises(ProtocolError) as failure:
        messages.parse_hello(WORKER | wrong)
    assert next(iter(wrong)) in str(failure.value)
    assert len(str(failure.value)) <= messages.MAX_REASON_CHARACTERS


@pytest.mark.parametrize("name", sorted(WORKER.keys() - {"key", "agent", "table"}))
def test_a_greeting_without_a_field_is_refused(name):
    with pytest.raises(ProtocolError, match="role" if name == "role" else f"{name}: Field required"):
        messages.parse_hello({one: value for one, value in WORKER.items() if one != name})


@pytest.mark.parametrize(
    ("role", "kind", "fields"),
    [
        ("worker", "beat", {"lane_s": float("inf")}), ("worker", "beat", {"lane_s": [1]}),
        ("worker", "beat", {"since_s": -1.0}), ("worker", "beat", {"step": 1.5}), ("worker", "beat", {"units": 2**63}),
        ("worker", "beat", {"phase": 3}), ("worker", "beat", {"leaving": 1}), ("worker", "beat", {"other": 1}),
        ("worker", "standing", {}), ("worker", "standing", {"view": "x", "position": 3}),
        ("worker", "standing", {"view": 1, "position": float("inf")}),
        ("worker", "standing", {"view": 1, "position": -1}),
        ("worker", "cuts", {"cuts": [1]}), ("worker", "cuts", {"cuts": [2, 1]}), ("worker", "cuts", {"cuts": "ab"}),
        ("worker", "event", {"row": 7}), ("worker", "event", {"row": "x" * (1 << 21)}), ("worker", "what", {}),
        ("worker", "stop", {}), ("worker", "output", {"seat": 1, "text": "x"}),
        ("worker", "filled", {"seat": 1, "table": 1}),
        ("server", "beat", {"served": {"pushes": float("nan")}}), ("server", "beat", {"served": {"pushes": {}}}),
        ("server", "beat", {"served": {str(n): n for n in range(100)}}), ("server", "filled", {"seat": -1, "table": 1}),
        ("server", "standing", {"view": 1, "position": 1}),
        ("agent", "exited", {"seat": 1, "code": 10**9, "reason": ""}),
        ("agent", "output", {"seat": 1, "text": "x" * 5000}), ("user", "scale", {}), ("user", "scale", {"wanted": 0}),
        ("user", "scale", {"wanted": 2**40}), ("user", "drain", {}), ("user", "drain", {"seat": 1, "role": "driver"}),
        ("user", "beat", {}),
    ],
)  # fmt: skip
def test_a_message_of_another_kind_type_or_range_is_refused(role, kind, fields):
    with pytest.raises(ProtocolError):
        PARSERS[role](kind, fields)


@given(st.data())
def test_whatever_is_said_is_a_message_or_refused(data):
    """After a mutation, what is accepted still has every bound: it can be written as JSON and read as the same."""
    role, kind, fields = data.draw(st.sampled_from(VALID))
    said = data.draw(mutated(fields) if fields else st.dictionaries(st.text(), json_values))
    try:
        found = PARSERS[role](kind, said) if data.draw(st.booleans()) else messages.parse_hello(said)
    except ProtocolError:
        return
    text = json.dumps(found.model_dump(mode="json"), allow_nan=False)
    assert type(found).model_validate_json(text) == found


def test_texts_for_people_have_no_control_characters():
    assert printable("\x1b[2Jä\n\u202ex\ud800") == "?[2Jä??x?"
    assert printable("a" * 1000, limit=10) == "a" * 9 + "…"
