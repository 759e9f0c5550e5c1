"""The worker's one loop: join, step, commit, save; evaluation."""
