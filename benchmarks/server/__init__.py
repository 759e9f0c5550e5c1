"""What a push and a pull of 40 MB cost: Shoal's servers beside bare sockets, Ray actors and torch's RPC."""
