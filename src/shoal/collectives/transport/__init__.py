"""Links between the workers of a view: shared memory on one host, sockets between hosts."""
