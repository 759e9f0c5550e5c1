"""Sync objects: how replicas agree on a step."""
