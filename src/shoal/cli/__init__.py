"""The command line: one thin function per verb, one file per group of verbs. Never imports torch."""

from shoal.cli.program import app, main

__all__ = ["app", "main"]
