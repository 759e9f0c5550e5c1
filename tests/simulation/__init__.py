"""A deterministic simulation of a run: driver, workers, network, clock and disk in one process. See docs/simulation.md."""
