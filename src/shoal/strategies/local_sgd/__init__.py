"""Lanes that train by themselves for a while and then agree."""
