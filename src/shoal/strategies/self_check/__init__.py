"""Checks during a run that its result depends on nothing but what a checkpoint holds."""
