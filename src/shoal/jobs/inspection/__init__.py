"""Looking into a live run: stacks, and profiles of some steps."""
