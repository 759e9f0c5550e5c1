"""Output for users: live display, plain lines, tables, curves. No decisions."""
