"""Machines and processes: engines start and watch workers and servers; the control channel links them to the driver."""
