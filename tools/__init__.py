"""Programs for the development of Shoal."""
