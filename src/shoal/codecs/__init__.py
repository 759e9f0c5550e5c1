"""Tensors to fewer bytes and back. `size` knows how many, without torch; `make` gives the codec of a job."""
