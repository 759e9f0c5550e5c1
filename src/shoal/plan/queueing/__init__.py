"""Decisions about a queue of jobs: the states of an entry, who is next, when a daemon counts as dead. No I/O."""
