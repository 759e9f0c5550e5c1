"""What decides about the bits of a computation, besides the job: versions and the kind of processor."""

from __future__ import annotations

import importlib.metadata
import platform
import re
import sys
from collections.abc import Mapping
from pathlib import Path

PACKAGES = ("numpy", "safetensors", "torchmetrics", "scikit-learn", "pandas", "pyarrow", "transformers", "datasets")
"""Packages that make batches, weights or metrics. One that is missing on a machine is no difference: a job that needs
it fails there with its name, and other jobs may run."""


def platform_facts() -> dict[str, str]:
    """The facts of this process. Torch is not imported here: its facts are known if somebody has imported it."""
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    facts = {"python": python, "shoal": str(sys.modules["shoal"].__version__), "machine": platform.machine()}
    torch = sys.modules.get("torch")
    if torch is not None:
        facts |= {"torch": str(torch.__version__), "processor": str(torch.backends.cpu.get_cpu_capability())}
    if maker := processor_maker():
        facts["maker"] = maker
    return facts | {name: version for name in PACKAGES if (version := _version(name))}


def processor_maker(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Who made the processor; '' if the kernel does not say. MKL multiplies in another order on others than Intel's."""
    try:
        text = cpuinfo.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    found = re.search(r"^(?:vendor_id|CPU implementer)\s*: *(\S+)", text, re.MULTILINE)
    return found.group(1)[:64] if found else ""


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def describe_difference(one: Mapping[str, str], other: Mapping[str, str]) -> str:
    """What differs, such as "torch 2.13.0 and 2.12.1"; '' if nothing does."""
    names = sorted({*one, *other})
    comparable = [name for name in names if name not in PACKAGES or (name in one and name in other)]
    differing = [name for name in comparable if one.get(name) != other.get(name)]
    return ", ".join(f"{name} {one.get(name, 'missing')} and {other.get(name, 'missing')}" for name in differing)
