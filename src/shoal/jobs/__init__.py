"""Whole jobs: run one, k folds of one."""
