"""What runs leave on disk: their curves for any zoom, logs, sizes, tags, the trash, and exports. Never loads torch."""
