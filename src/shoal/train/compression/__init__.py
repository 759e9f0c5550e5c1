"""The process that compresses and measures models for the driver: one action per call."""
