"""Local SGD: lanes train independently for some steps, then sync."""
