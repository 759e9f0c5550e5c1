"""What happened: one append-only stream per run, and folds of it into a picture of the run."""

from shoal.events.run_state import Curve, RunState, replay
from shoal.events.stream import Event, EventReader, EventWriter, LineTail, read_events

__all__ = ["Curve", "Event", "EventReader", "EventWriter", "LineTail", "RunState", "read_events", "replay"]
