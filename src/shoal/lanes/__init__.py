"""Exact forward and backward of one lane, and the sum over lanes."""
