"""Connections between processes: authentication, TLS, framed JSON messages with bounded size."""
