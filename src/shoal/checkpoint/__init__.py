"""Checkpoints: atomic saves, manifests, content-addressed tensors, exports."""
