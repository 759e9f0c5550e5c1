"""Bytes between processes: who may talk, and how much."""
