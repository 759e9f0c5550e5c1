"""Compression as data: what a user asks for, the steps that were taken, and what was measured."""
