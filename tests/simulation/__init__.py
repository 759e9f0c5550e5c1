"""A deterministic simulation of a run in one process, with virtual time. See docs/simulation.md."""
