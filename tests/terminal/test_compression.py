"""What a person reads about a compression."""

from io import StringIO

from rich.console import Console

from shoal.spec.compression.measured import CompressionReport, RungReport
from shoal.spec.compression.steps import CutStep, Kept
from shoal.terminal.compression import print_report


def test_layers_that_no_rung_could_make_smaller_are_named_once_for_each_reason():
    blocks = {f"blocks.{i}": "two layers share it" for i in range(5)}
    rungs = [
        RungReport(name="parent", kept=True),
        RungReport(name="lossless", refused={"first": "nothing is known of sin", "head": "it is an output"}),
        RungReport(name="prune", steps=[CutStep(layers={"first": Kept(out="0-3")})], refused=blocks),
    ]
    report = CompressionReport(parent="a", parent_sha256="0" * 64, rungs=rungs, chosen="parent", targets_met=True)
    console = Console(file=StringIO(), width=200)
    print_report(console, report)
    said = [line for line in console.file.getvalue().splitlines() if line.startswith("Left whole")]
    assert said == [
        "Left whole: head: it is an output",
        "Left whole: blocks.0, blocks.1, blocks.2 and 2 more: two layers share it",
    ]
