"""A queue of jobs in one SQLite file, and the daemon that runs them. Loses no job, and starts none twice."""
