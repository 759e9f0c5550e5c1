"""Compression on MNIST: sizes, times and accuracies of the files that `shoal compress` writes."""
