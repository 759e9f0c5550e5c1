"""Decisions of the driver as pure functions and state machines. Nothing here does I/O."""
