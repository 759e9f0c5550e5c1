"""Jobs and their runs: plan, start, drive, stop, resume, verify."""
