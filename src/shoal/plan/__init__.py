"""Every decision and no act."""
