"""Bodies of the Engine seam."""
