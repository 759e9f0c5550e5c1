"""python -m benchmarks.bits REV [--only WORD] [--kept DIR]

Runs every case with the code of the commit REV and with the code of this tree, each in processes of its own, and
compares the SHA-256 of weights and state, the metrics and the samples seen. Runs that REV left unfinished are resumed
by this tree too. Exits with 1 where anything differs. Results of REV are kept in DIR, where one is named, and read
from there the next time.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from benchmarks import report
from benchmarks.bits.cases import Case, cases
from benchmarks.bits.older import in_words_of

COMPARED = ("weights_sha256", "state_sha256", "metrics", "samples_seen", "steps")
Bits = dict[str, dict[str, Any]]


class Tree:
    """A checkout whose command line is run, and the directory where its runs lie."""

    def __init__(self, source: Path, place: Path) -> None:
        self.source = source
        self.place = place

    def begin(self, case: Case) -> Path:
        """Run the case until it ends, well or not. Returns its directory."""
        there = self.place / case.name.replace(" ", "-").replace(",", "")
        shutil.rmtree(there, ignore_errors=True)
        there.mkdir(parents=True)
        shutil.copy(Path(__file__).parent / "models.py", there)
        words = ["shoal", "fish", "lane", "swims", "with", "the", "tide", "and", "turns", "again"]
        (there / "text.txt").write_text(" ".join(words[(i * i + i // 3) % len(words)] for i in range(1200)))
        job = in_words_of(self.source, case.written(str(there)))
        (there / "job.yaml").write_text(yaml.safe_dump(job))
        self._shoal(there, "run", "job.yaml")
        return there

    def resume(self, there: Path) -> None:
        """Without the watchers that killed it."""
        (field,) = in_words_of(self.source, {"watchers": []})
        self._shoal(there, "resume", "last", "--set", f"{field}=[]")

    def _shoal(self, there: Path, *words: str) -> None:
        environment = report.environment() | {"PYTHONPATH": str(self.source / "src")}
        command = [sys.executable, "-P", "-m", "shoal", *words, "--runs", "runs", "--json"]
        with (there / "output.txt").open("a") as output:
            subprocess.run(command, cwd=there, env=environment, stdout=output, stderr=subprocess.STDOUT, check=False)


def bits_of(there: Path) -> Bits:
    """What each receipt below this directory says."""
    found = {}
    for path in sorted(there.glob("runs/**/receipt.json")):
        receipt = json.loads(path.read_text())
        found[str(path.parent.relative_to(there))] = {name: receipt.get(name) for name in COMPARED}
    return found


def whole(tree: Tree, case: Case) -> Bits:
    there = tree.begin(case)
    if case.interrupted:
        tree.resume(there)
    return bits_of(there)


def checked_out(revision: str, place: Path) -> Path:
    if not (place / "src").is_dir():
        place.mkdir(parents=True, exist_ok=True)
        archive = subprocess.run(["git", "archive", revision], cwd=report.SOURCES, capture_output=True, check=True)
        subprocess.run(["tar", "-x", "-C", str(place)], input=archive.stdout, check=True)
    return place


def bits_before(tree: Tree, case: Case) -> Bits:
    """The other commit's bits, and for interrupted cases its directory as it was before it was resumed."""
    there = tree.place / case.name.replace(" ", "-").replace(",", "")
    kept = there.with_suffix(".json")
    if not kept.is_file():
        tree.begin(case)
        if case.interrupted:
            shutil.copytree(there, there.with_suffix(".begun"), dirs_exist_ok=True)
            tree.resume(there)
        kept.write_text(json.dumps(bits_of(there), indent=1))
    return dict(json.loads(kept.read_text()))


def continued(before: Tree, now: Tree, case: Case) -> Bits:
    """Begun by the other commit, resumed by this tree."""
    begun = before.place / (case.name.replace(" ", "-").replace(",", "") + ".begun")
    there = now.place / f"{begun.stem}-continued"
    shutil.rmtree(there, ignore_errors=True)
    shutil.copytree(begun, there)
    now.resume(there)
    return bits_of(there)


def compared(before: Tree, now: Tree, case: Case) -> list[dict[str, str]]:
    """Rows of the table: a case, and whether its bits are the same."""
    expected = bits_before(before, case)
    rows = [_row(case.name, expected, whole(now, case), now)]
    if case.interrupted:
        rows.append(_row(f"{case.name}, begun before", expected, continued(before, now, case), now))
    return rows


def _row(name: str, expected: Bits, found: Bits, now: Tree) -> dict[str, str]:
    if not expected:
        return {"case": name, "weights": "", "same": "no: the other commit has no receipt"}
    if not found:
        return {"case": name, "weights": "", "same": f"no: no receipt, see {now.place}"}
    different = sorted(
        f"{run}: {field}"
        for run in expected.keys() | found.keys()
        for field in COMPARED
        if expected.get(run, {}).get(field) != found.get(run, {}).get(field)
    )
    first = next(iter(expected.values()))["weights_sha256"][:12]
    return {"case": name, "weights": first, "same": "no: " + ", ".join(different) if different else "yes"}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bits", description="The same bits on two commits?")
    parser.add_argument("revision", help="the commit to compare this tree with")
    parser.add_argument("--only", default="", help="cases whose names contain this")
    parser.add_argument("--kept", type=Path, help="where the results of that commit are kept, and read again")
    parser.add_argument("--write", action="store_true", help="keep the table in results/bits.json")
    asked = parser.parse_args(arguments)
    console = Console()
    with tempfile.TemporaryDirectory(prefix="shoal-bits-") as scratch:
        kept = (asked.kept or Path(scratch, "before")).absolute()
        before = Tree(checked_out(asked.revision, kept / "source"), kept / "runs")
        now = Tree(report.SOURCES, Path(scratch, "now"))
        rows = []
        for case in cases():
            if asked.only in case.name:
                for row in compared(before, now, case):
                    console.print(f"{row['case']}: {row['same']}")
                    rows.append(row)
        console.print(report.table(f"this tree and {asked.revision}", rows))
        if asked.write:
            report.keep("bits", asked.revision, {"rows": rows})
        return int(any(row["same"] != "yes" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
