"""Searches simulated on tables of learning curves, side by side with other tools' policies."""
