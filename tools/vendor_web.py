"""python -m tools.vendor_web: fetch the libraries of the web page with npm, into src/shoal/web/static/vendor.

Needs npm. Users and tests do not: the files are part of the source, and `manifest.json` has their versions, licences
and SHA-256. Bare imports become relative ones; nothing else is changed.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import tarfile
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

VENDOR = Path(__file__).parents[1] / "src" / "shoal" / "web" / "static" / "vendor"


class VendoredFile(NamedTuple):
    """One file of a package. `add` is appended, to make a module of a script."""

    package: str
    version: str
    licence: str
    source: str
    target: str
    add: str = ""


FILES = (
    VendoredFile("preact", "10.29.8", "MIT", "dist/preact.module.js", "preact.js"),
    VendoredFile("preact", "10.29.8", "MIT", "hooks/dist/hooks.module.js", "hooks.js"),
    VendoredFile("htm", "3.1.1", "Apache-2.0", "dist/htm.module.js", "htm.js"),
    VendoredFile("uplot", "1.6.32", "MIT", "dist/uPlot.iife.min.js", "uplot.js", "\nexport default uPlot;\n"),
    VendoredFile("uplot", "1.6.32", "MIT", "dist/uPlot.min.css", "uplot.css"),
)


def main() -> None:
    manifest: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for one in FILES:
            manifest[one.target] = vendor(one, Path(scratch))
    (VENDOR / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")


def vendor(one: VendoredFile, scratch: Path) -> dict[str, str]:
    archive = scratch / f"{one.package}-{one.version}.tgz"
    if not archive.exists():
        subprocess.run(["npm", "pack", "--silent", f"{one.package}@{one.version}"], cwd=scratch, check=True)
    with tarfile.open(archive) as packed:
        content = _member(packed, one.source).decode()
        (VENDOR / f"LICENSE-{one.package}.txt").write_bytes(_member(packed, "LICENSE"))
    lines = [line for line in content.splitlines() if not line.startswith("//# sourceMappingURL=")]
    text = "\n".join(lines).replace('from"preact"', 'from"./preact.js"') + "\n" + one.add
    (VENDOR / one.target).write_text(text)
    digest = hashlib.sha256(text.encode()).hexdigest()
    return {"package": one.package, "version": one.version, "licence": one.licence, "sha256": digest}


def _member(packed: tarfile.TarFile, name: str) -> bytes:
    found = packed.extractfile(f"package/{name}")
    if found is None:
        raise FileNotFoundError(name)
    return found.read()


if __name__ == "__main__":
    main()
