"""Addresses as text: HOST:PORT, and [HOST]:PORT for IPv6."""

from __future__ import annotations

import re

ANY_PORT = range(1)
"""Port 0: the kernel chooses."""


def parse_address(text: str) -> tuple[str, int]:
    """Host and port. ValueError if the text is no address."""
    found = re.fullmatch(r"\[?([^\[\]\s]+?)\]?:(\d{1,5})", text)
    if not found:
        raise ValueError(f"'{text}' is not HOST:PORT")
    return found[1], int(found[2])


def format_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
