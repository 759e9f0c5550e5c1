"""Which trial a search trains next, and how far: decided in virtual time, the same on any number of workers."""
