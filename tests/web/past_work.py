"""A search and a compression of the past, written without training."""

import copy

from shoal.jobs.search.journal import EndedRow, ShapeRow, StartedRow, ToldRow
from shoal.jobs.search.search_dir import SearchPaths
from shoal.spec.compression.measured import REPORT, Artefact, CompressionReport, Latency, Quality, Ratio, RungReport
from shoal.spec.load import make_job, save_job
from shoal.spec.run_paths import RunPaths
from tests.jobs.past_run import write_run
from tests.jobs.search.conftest import SMALL
from tests.jobs.search.test_replay import PROMOTE, continued

TWO_METRICS = PROMOTE | {"metric": ["accuracy", "parameters"]}


def write_search(root, *, ended=True):
    """A search for accuracy and few parameters; trial 0 has a run of its own. Returns its rows."""
    paths = SearchPaths(RunPaths.at(root))
    paths.root.mkdir(parents=True)
    data = copy.deepcopy(SMALL) | {"search": SMALL["search"] | TWO_METRICS}
    job = make_job(data, base_dir=str(root), check_names=False)
    save_job(job, paths.job)
    rows = [StartedRow(t=1.7e9), *continued(job, [], facts=parameters_of)]
    rows = rows if ended else [row for row in rows if not isinstance(row, EndedRow)]
    paths.journal.write_bytes(b"".join(row.model_dump_json().encode() + b"\n" for row in rows))
    write_run(paths.trial(0).root)
    return rows


def parameters_of(changes):
    return {"parameters": 1000.0 * changes["batch_size"]}


def told(rows):
    return sum(isinstance(row, ToldRow) for row in rows)


def trials(rows):
    return sum(isinstance(row, ShapeRow) for row in rows)


def write_compression(root, *, parent="mlp-1"):
    paths = write_run(root)
    latency = Latency(name="int8", seconds={1: 1e-5}, ratios={1: Ratio(median=0.5, low=0.45, high=0.55)})
    quality = Quality(
        part="validation", metric="accuracy", samples=359, parent=0.9, value=0.89, drop=0.01, drop_bound=0.02,
        smallest_bound=0.008, changed=5,
    )  # fmt: skip
    rungs = [
        RungReport(name="parent", artefact=artefact(9000), size_ratio=1.0, parameters=2410, why="as it is"),
        RungReport(name="int8", artefact=artefact(2250), size_ratio=0.25, parameters=2410, quality=quality,
                   latency=latency, kept=True, why="smaller and good enough"),
    ]  # fmt: skip
    report = CompressionReport(parent=parent, parent_sha256="ab" * 32, rungs=rungs, chosen="int8", targets_met=True)
    (paths.root / REPORT).write_text(report.model_dump_json())
    return paths


def artefact(size_bytes):
    return Artefact(path="model.onnx", size_bytes=size_bytes, sha256="cd" * 32)
