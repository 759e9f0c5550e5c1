"""Programs for those who work on Shoal itself."""
