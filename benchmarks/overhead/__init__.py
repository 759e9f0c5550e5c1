"""What Shoal costs beside plain PyTorch: the loop, lanes, the start, loading, checkpoints."""
