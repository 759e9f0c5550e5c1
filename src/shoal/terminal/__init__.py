"""Runs as a person sees them: live display, plain lines, tables, curves. It decides nothing."""
