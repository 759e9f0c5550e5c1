"""What synchronous training over processes costs: Shoal's lanes beside torch's DistributedDataParallel."""
