"""The queue: how fast it is with many jobs, and what elastic workers bring to a machine with several jobs."""
