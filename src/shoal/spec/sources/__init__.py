"""Where samples come from, as checked data."""
