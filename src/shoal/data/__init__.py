"""Sources, splits, and which sample goes to which lane at which step."""
