"""One replica of a model, spread over several workers: by fsdp, by tensors, or as a pipeline."""
