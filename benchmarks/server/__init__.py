"""The cost of pushing and pulling 40 MB: Shoal's servers against bare sockets, Ray actors and torch's RPC."""
