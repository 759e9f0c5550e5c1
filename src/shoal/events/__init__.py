"""What happened: one append-only stream per run, and folds of it into a picture of the run."""

from shoal.events.picture import Curve, Picture, fold
from shoal.events.stream import Event, Lines, Reader, Stream, read

__all__ = ["Curve", "Event", "Lines", "Picture", "Reader", "Stream", "fold", "read"]
