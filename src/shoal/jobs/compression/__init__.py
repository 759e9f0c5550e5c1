"""`shoal compress`: the ladder of steps, each measured and kept only if it pays, and the run that comes out."""
