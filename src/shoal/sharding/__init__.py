"""One replica of a model spread over several workers: FSDP, tensor parallel or pipeline parallel."""
