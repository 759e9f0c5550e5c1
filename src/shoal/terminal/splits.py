"""A split, printed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console


def show(console: Console, answer: Mapping[str, Any]) -> None:
    console.print_json(data=dict(answer))
