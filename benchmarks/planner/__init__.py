"""Predictions of `shoal plan` against measurements."""
