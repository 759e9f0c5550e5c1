"""Implementations of Engine."""
