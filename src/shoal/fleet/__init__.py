"""Machines and processes: engines start and watch workers and servers, the control channel tells them what to do."""
