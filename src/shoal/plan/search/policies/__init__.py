"""Which trial a free slot trains next, and how far."""
