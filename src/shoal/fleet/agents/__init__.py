"""Agents: processes on other machines. They start workers, carry their files and output, and exit with the driver."""
