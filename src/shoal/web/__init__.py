"""The web page and the REST API of a directory of runs. It reads the runs' files and uses the command channel that the
command line uses; no run depends on it. Never loads torch."""
