"""Alerts of a run: the driver judges them, with every page closed, and tells them by webhook or command."""
