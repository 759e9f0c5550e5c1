"""The implementations of `DataSource`, one per kind of data."""
