"""What classes and functions take, read from their source: nothing is imported."""
