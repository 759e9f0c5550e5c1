"""Sparse tables: embeddings that are larger than a worker's memory, held row by row on servers."""
