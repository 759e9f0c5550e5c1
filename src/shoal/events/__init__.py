"""The events of a run: one append-only typed stream, folded into the state of the run."""

from shoal.events.event import Event
from shoal.events.quick_summary import quick_summary
from shoal.events.run_state import RunState, describe_damage, replay
from shoal.events.snapshot import RunStateReader, RunSummary, load_state, load_summary
from shoal.events.state_parts import Curve
from shoal.events.stream import EventReader, EventWriter, LineTail, read_events
from shoal.events.summary_index import SummaryIndex

__all__ = [
    "Curve",
    "Event",
    "EventReader",
    "EventWriter",
    "LineTail",
    "RunState",
    "RunStateReader",
    "RunSummary",
    "SummaryIndex",
    "describe_damage",
    "load_state",
    "load_summary",
    "quick_summary",
    "read_events",
    "replay",
]
