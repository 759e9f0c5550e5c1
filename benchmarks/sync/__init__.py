"""The cost of synchronous training over processes: Shoal's lanes against torch's DistributedDataParallel."""
