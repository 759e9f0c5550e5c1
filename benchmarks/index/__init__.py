"""How long it takes to look at runs of the past."""
