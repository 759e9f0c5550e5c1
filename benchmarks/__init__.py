"""Benchmarks: one runnable package for each claim about speed."""
