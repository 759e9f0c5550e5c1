"""Runs as a person sees them: live display, plain lines, tables, curves. Reads pictures and receipts, decides nothing."""
