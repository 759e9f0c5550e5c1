"""Clusters of similar samples: as groups and strata, the same for every worker, and told by the report."""

import io

import numpy as np
import pytest
from rich.console import Console
from scipy.spatial.distance import cdist
from threadpoolctl import threadpool_limits

from shoal.data.cluster_report import cluster_report
from shoal.data.clusters import with_clusters
from shoal.data.split import split
from shoal.errors import ShoalError
from shoal.spec.data import ClusterConfig, DataConfig
from shoal.spec.load import make_job
from shoal.spec.run_paths import RunPaths
from shoal.terminal.splits import print_split
from shoal.train.probe_main import describe_split
from tests.conftest import MLP
from tests.data.memory_source import MemorySource
from tests.train.fake_strategy import RecordingStream

BLOBS = 6


def blobs(count=120):
    """Samples around six points that lie far apart."""
    made = np.random.default_rng(0)
    kind = made.permutation(np.arange(count) % BLOBS)
    return kind, (np.array([[10.0 * k, (-1.0) ** k * 20] for k in range(BLOBS)])[kind] + made.normal(size=(count, 2)))


def clustered(source, **config):
    return with_clusters(source, ClusterConfig(**config), seed=0, base_dir=".")


def parts(source, spec):
    return split(DataConfig.model_validate({"source": {"kind": "sklearn", "name": "iris"}, "split": spec}).split,
                 source, seed=0)  # fmt: skip


def source_of(kind, points):
    return MemorySource(len(points), x=points, a=points[:, 0], b=points[:, 1], word=kind.astype(str))


@pytest.mark.parametrize("how", [{}, {"by": ["a", "b"]}])
@pytest.mark.parametrize("size", [{"count": BLOBS}, {"distance": 0.5}])
def test_what_is_alike_is_one_cluster(how, size):
    kind, points = blobs()
    labels = clustered(source_of(kind, points), **how, **size).column("cluster")
    assert len({(k, c) for k, c in zip(kind, labels, strict=True)}) == BLOBS == len(set(labels))
    assert list(dict.fromkeys(labels.tolist())) == list(range(BLOBS))  # numbered as they occur


def test_groups_keep_clusters_apart_and_strata_spread_them():
    kind, points = blobs()
    source = clustered(source_of(kind, points), count=BLOBS)
    labels = source.column("cluster")
    grouped = parts(source, {"kind": "holdout", "validation": 0.3, "group": "cluster"})
    assert not set(labels[grouped.train]) & set(labels[grouped.validation])
    strata = parts(source, {"kind": "stratified", "folds": 5, "by": "cluster"})
    assert np.bincount(labels[strata.validation]).tolist() == [4] * BLOBS


def test_a_distance_is_kept_between_the_sides():
    points = np.random.default_rng(1).normal(size=(150, 2)) * 3
    source = clustered(MemorySource(150, x=points), distance=0.4, scale=False)
    for fold in range(3):
        spec = {"kind": "grouped", "folds": 3, "by": "cluster", "fold": fold}
        found = split(DataConfig.model_validate({"source": {"kind": "sklearn", "name": "iris"}, "split": spec}).split,
                      source, seed=0, fold=fold)  # fmt: skip
        assert cdist(points[found.train], points[found.validation]).min() > 0.4


def test_the_report_shows_how_far_apart_the_sides_are():
    kind, points = blobs()
    source = clustered(source_of(kind, points), count=BLOBS)
    found = parts(source, {"kind": "holdout", "validation": 0.3, "group": "cluster"})
    report = cluster_report(source, {0: found})
    assert (report["count"], report["smallest"], report["largest"]) == (BLOBS, 20, 20)
    fold = report["folds"]["0"]
    exact = float(np.median(cdist(source.features[found.validation], source.features[found.train]).min(1)))
    assert fold["distance"] == pytest.approx(exact)
    assert (fold["on_both_sides"], fold["distance"] > 5 * fold["random_distance"]) == (0, True)


def test_features_are_a_function_or_a_module(job_dir):
    (job_dir / "embed.py").write_text(
        "import torch\n"
        "def first(batch, factor=1.0):\n    return batch.inputs[0][:, :1] * factor\n"
        "class Net(torch.nn.Module):\n"
        "    def forward(self, x):\n        assert not self.training\n        return x[:, :1]\n"
        "def bad(batch):\n    return batch.inputs[0][:1]\n"
        "def broken(batch):\n    raise ValueError('no')\n"
    )
    kind, points = blobs()
    wanted = clustered(source_of(kind, points), by="a", count=3).column("cluster")
    for features in ({"name": "embed.py:first", "args": {"factor": 2.0}}, "embed.py:Net"):
        config = ClusterConfig(features=features, count=3)
        found = with_clusters(MemorySource(len(points), x=points), config, seed=0, base_dir=str(job_dir))
        assert found.column("cluster").tolist() == wanted.tolist()
    for name, words in (("bad", "returned"), ("broken", "ValueError: no")):
        config = ClusterConfig(features=f"embed.py:{name}", count=3)
        with pytest.raises(ShoalError, match=words) as caught:
            with_clusters(MemorySource(len(points), x=points), config, seed=0, base_dir=str(job_dir))
        assert caught.value.code == "SH730"


@pytest.mark.parametrize(
    ("config", "words"),
    [({"by": "word", "count": 2}, "no numbers"), ({"count": 500}, "120 different"), ({"by": "c", "count": 2}, "'c'")],
)
def test_what_cannot_be_clustered_is_told(config, words):
    with pytest.raises(ShoalError, match=words):
        clustered(source_of(*blobs()), **config)


@pytest.mark.parametrize(
    "data",
    [
        {"clusters": {"count": 3}},
        {"clusters": {}, "split": {"kind": "grouped", "by": "cluster"}},
        {"clusters": {"count": 3, "distance": 1.0}, "split": {"kind": "grouped", "by": "cluster"}},
    ],
)
def test_clusters_that_say_too_little_or_too_much_are_refused(data):
    with pytest.raises(ValueError, match="clusters"):
        DataConfig.model_validate({"source": {"kind": "sklearn", "name": "iris"}} | data)


DIGITS = MLP["data"] | {"clusters": {"count": 12}, "split": {"kind": "holdout", "validation": 0.2, "group": "cluster"}}


def test_shoal_split_prints_it(job_dir):
    job = make_job(MLP | {"data": DIGITS}, base_dir=str(job_dir))
    answer = describe_split(job, RunPaths.at(job_dir / "run"), RecordingStream("clerk"))
    screen = io.StringIO()
    print_split(Console(file=screen, width=200), answer)
    assert "12 clusters of" in screen.getvalue()
    assert "fold 0: on both sides: 0 clusters" in screen.getvalue()


def test_threads_do_not_change_the_clusters():
    points = np.random.default_rng(2).normal(size=(3000, 8))
    found = []
    for threads in (1, 4):
        with threadpool_limits(limits=threads):
            found.append(clustered(MemorySource(3000, x=points), count=40).column("cluster").tolist())
    assert found[0] == found[1]


def test_clusters_and_weighted_draws_give_the_same_weights_on_one_worker_and_on_two(run):
    job = MLP | {"data": DIGITS | {"sampler": "weighted"}, "steps": 6, "evaluate": {"every_steps": 6}}
    one, two = (run(job, workers=n, runs=f"runs-{n}").receipt for n in (1, 2))
    assert (one.weights_sha256, one.metrics) == (two.weights_sha256, two.metrics)
