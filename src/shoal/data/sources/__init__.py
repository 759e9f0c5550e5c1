"""The bodies of `Source`, one per kind of data."""
