"""What stands where a file was expected: the fix for a path that leads nowhere."""

from __future__ import annotations

from pathlib import Path

from shoal.errors import closest_name

MOST_SHOWN = 10


def suggest_path(path: Path, *, suffixes: tuple[str, ...] = ()) -> str:
    """The file that was probably meant; what else there is; or the first directory that is missing."""
    folder = path.parent
    if not folder.is_dir():
        while not folder.parent.is_dir():
            folder = folder.parent
        return f"There is no directory {folder}."
    names = sorted(p.name for p in folder.iterdir() if not suffixes or p.suffix in suffixes)
    shown = ", ".join(names[:MOST_SHOWN]) + (", …" if len(names) > MOST_SHOWN else "")
    close = closest_name(path.name, names)
    hint = f"Did you mean '{close}'? " if close else ""
    return f"{hint}{folder} has: {shown}." if names else f"{folder} has no such files."
