"""Libraries of the extra `compress`, imported where they are needed."""

from __future__ import annotations

import importlib
from typing import Any

from shoal.errors import error


def load_library(name: str) -> Any:
    """The module. SH664 if it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError as failure:
        raise error("SH664", f"{name} cannot be imported: {failure}", where="compress") from failure
