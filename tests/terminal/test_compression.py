"""What a person reads about a compression."""

from io import StringIO

import pytest
from rich.console import Console

from shoal.spec.compression.measured import Artefact, CompressionReport, Latency, Quality, Ratio, RungReport
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


@pytest.mark.parametrize("width", [80, 130])
def test_no_number_and_no_word_is_cut_off(width):
    ratio = Ratio(median=0.735, low=0.734, high=0.745)
    facts = {"part": "validation", "metric": "accuracy", "samples": 9, "parent": 0.9, "changed": 3, "value": 0.98}
    row = RungReport(
        name="prune 25%, from scratch",
        artefact=Artefact(path="model.onnx", size_bytes=123_900, sha256="0" * 64),
        size_ratio=0.572,
        quality=Quality(**facts, drop=-0.0016, drop_bound=-0.0003, smallest_bound=0.0),
        latency=Latency(name="made", seconds={1: 1.0}, ratios={1: ratio, 64: ratio}),
        why="the drop may be 10.03%, more than 1.00%",
    )
    report = CompressionReport(parent="a", parent_sha256="0" * 64, rungs=[row], chosen=row.name, targets_met=False)
    console = Console(file=StringIO(), width=width)
    print_report(console, report)
    said = console.file.getvalue()
    words = [*row.name.split(), *row.why.split(), "123.9 kB", "57.2%", "-0.16%", "≤ -0.03%", "0.9800", "(0.73–0.74)"]
    assert [word for word in words if word not in said] == []
    assert said.count("(0.73–0.74)") == 2
