"""Gradient codecs: tensors to fewer bytes and back. `size` computes sizes without torch; `make` builds a job's
codec."""
