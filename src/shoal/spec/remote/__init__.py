"""Machines that share nothing with the driver: files of hosts, and requests for files."""
