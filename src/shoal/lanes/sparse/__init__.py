"""Sparse tables as a model has them: the embedding module, its rows, keys and row optimizers."""
