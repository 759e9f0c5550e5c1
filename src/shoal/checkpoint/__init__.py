"""What must survive: atomic saves, manifests, content-addressed tensors, exports."""
