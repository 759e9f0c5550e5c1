"""What the probe answers, asked in this process."""

import json

import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import save_file

from shoal.errors import ShoalError
from shoal.spec.load import make_job
from shoal.spec.run_paths import RunPaths
from shoal.tasks.model import build_model
from shoal.train.probe_main import PROBES, _shape
from tests.conftest import MLP
from tests.train.fake_strategy import RecordingStream

FOLDS = {"kind": "kfold", "folds": 3}


@pytest.fixture
def ask(job_dir):
    """Asks a question about a job, and gives the answer as the driver reads it."""

    def go(question, *, changes=None, **arguments):
        fields = {name: value for name, value in (MLP | (changes or {})).items() if value is not None}
        job = make_job(fields, base_dir=str(job_dir))
        answer = PROBES[question](job, RunPaths.at(job_dir / "run"), RecordingStream("clerk"), **arguments)
        return json.loads(json.dumps(answer))

    return go


@pytest.fixture
def weights(job_dir):
    torch.manual_seed(0)
    model = build_model(make_job(MLP, base_dir=str(job_dir)))
    save_file(model.state_dict(), job_dir / "w.safetensors")
    return str(job_dir / "w.safetensors")


def data(**changes):
    return {"data": MLP["data"] | changes}


# ---- check ----


def test_a_check_counts_what_the_job_has(ask):
    answer = ask("check")
    count = 64 * 32 + 32 + 32 * 10 + 10
    assert (answer["parameters"], answer["trainable"]) == (count, count)
    assert answer["weights_bytes"] == answer["gradient_bytes"] == answer["optimizer_bytes"] == 4 * count
    assert (answer["steps"], answer["steps_per_epoch"]) == (60, 29)
    assert answer["samples"] == {"train": 1438, "validation": 359}
    assert answer["batch"] == {"inputs": ["float32 [13, 64]"], "target": "int64 [13]"}
    assert (answer["device"], answer["moving_buffers"]) == ("cpu", [])


def test_a_schedule_that_fails_at_its_step_is_told(ask):
    """torch looks at the arguments of a schedule when it makes a step."""
    with pytest.raises(ShoalError) as caught:
        ask("check", changes={"schedule": {"name": "StepLR", "every": "step", "args": {"step_size": "x"}}})
    assert caught.value.code == "SH413"
    assert "unsupported operand" in caught.value.message


def test_an_optimizer_that_cannot_be_made_is_told_with_its_field(ask):
    with pytest.raises(ShoalError) as caught:
        ask("check", changes={"optimizer": {"name": "AdamW", "args": {"betas": 0.9}}})
    assert (caught.value.code, caught.value.where) == ("SH208", "optimizer")


def test_a_check_evaluates_one_batch_after_one_step(ask):
    answer = ask("check")
    assert answer["metrics"].keys() == {"loss", "accuracy"}
    assert answer["metrics"]["accuracy"] * 50 == pytest.approx(round(answer["metrics"]["accuracy"] * 50), abs=1e-4)
    assert answer["loss"] == ask("check")["loss"]


GAN = {
    "task": "loops.py:Dcgan",
    "model": None,
    "loss": None,
    "metrics": [],
    "evaluate": {},
    "data": {"source": {"kind": "python", "factory": "loops.py:Images"}},
    "batch_size": 12,
}


def test_a_check_makes_a_step_with_all_its_phases(ask):
    answer = ask("check", changes=GAN)
    assert answer["loss"] == ask("check", changes=GAN)["loss"]
    assert "generator.main.1.running_mean" in answer["moving_buffers"]
    assert answer["optimizer_bytes"] > 2 * answer["weights_bytes"] * 0.9  # Adam, of both networks


@pytest.mark.parametrize("changes", [{"sync": "local"}, {"sync": "server"}, {"codec": "bf16"}])
def test_a_check_refuses_phases_without_exact_lanes(ask, changes):
    with pytest.raises(ShoalError, match="several phases") as caught:
        ask("check", changes=GAN | changes)
    assert caught.value.code == "SH860"


def test_a_check_computes_closures_and_lazy_modules(ask):
    optimizer = {"name": "LBFGS", "args": {"lr": 0.1, "max_iter": 3}}
    assert ask("check", changes={"optimizer": optimizer})["loss"] > 0
    assert ask("check", changes={"model": "loops.py:lazy"})["parameters"] == 64 * 32 + 32 + 64 + 32 * 10 + 10


def test_a_check_without_validation_has_no_metrics(ask):
    answer = ask("check", changes=data(split={"kind": "none"}) | {"evaluate": {}, "metrics": []})
    assert (answer["metrics"], answer["samples"]) == ({}, {"train": 1797})


def test_a_check_counts_frozen_parameters_apart(ask):
    answer = ask("check", changes={"init_from": {"freeze": ["0"]}})
    assert answer["parameters"] - answer["trainable"] == 64 * 32 + 32
    assert answer["gradient_bytes"] == 4 * answer["trainable"]


def test_a_model_that_fails_is_reported_with_its_line(ask, job_dir):
    with pytest.raises(ShoalError, match="expects 63 features and gets 64") as caught:
        ask("check", changes={"model": "models.py:WrongInputWidth"})
    assert caught.value.code == "SH715"
    assert caught.value.where.startswith(str(job_dir / "models.py"))


LAYERS = {
    "embedding": "nn.Embedding(17, 8, sparse=True)",
    "bag": "nn.EmbeddingBag(17, 8, sparse=True)",
    "functional": "Rows()",
}


@pytest.mark.parametrize(
    ("layer", "parameter"), [("embedding", "table.weight"), ("bag", "table.weight"), ("functional", "table.rows")]
)
@pytest.mark.parametrize("lanes", [1, 4])
def test_sparse_gradients_are_refused(ask, job_dir, layer, parameter, lanes):
    (job_dir / "rows.py").write_text(
        f"""
import torch
from torch import nn


class Rows(nn.Module):
    def __init__(self):
        super().__init__()
        self.rows = nn.Parameter(torch.ones(17, 8))

    def forward(self, ids):
        return nn.functional.embedding(ids, self.rows, sparse=True)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = {LAYERS[layer]}, nn.LazyLinear(10)
        self.head(self.table(torch.zeros(1, 64).long()).flatten(1))

    def forward(self, x):
        return self.head(self.table(x.long()).flatten(1))
"""
    )
    with pytest.raises(ShoalError, match=parameter) as caught:
        ask("check", changes={"model": "rows.py:Net", "lanes": lanes})
    assert (caught.value.code, caught.value.where) == ("SH420", "model")
    assert "SparseTable" in caught.value.fix


JOINED = {
    "model": "user_data.py:OfTokens",
    "metrics": [],
    "data": {
        "source": {"kind": "python", "factory": "user_data.py:Sequences", "collate": "user_data.py:join"},
        "split": "holdout",
    },
}
OWN_TASK = {"model": None, "loss": None, "metrics": []}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"loss": {"name": "CrossEntropyLoss", "args": {"weight": [1.0] * 10}}}, []),
        ({"loss": "torch.nn.functional:cross_entropy"}, []),
        ({"loss": "models.py:classes_loss"}, ["let it return (sum, weight)"]),
        ({"loss": "models.py:classes_loss", "lanes": 1}, []),
        ({"loss": "models.py:LearnedLoss", "lanes": 1}, ["has parameters of its own, which are not trained"]),
        (JOINED, ["of a batch of 13 samples has another number of rows"]),
        (JOINED | {"lanes": 1}, []),
        (OWN_TASK | {"task": "models.py:ParamGroupsTask"}, ["let it return (sum, weight)"]),
        (OWN_TASK | {"task": "models.py:TokenTask"}, []),
        (OWN_TASK | {"task": "models.py:TokenTask", "sync": "local"}, ["lanes agree every", "divides by its own"]),
    ],
)
def test_a_check_notes_what_it_cannot_know_of_a_loss(ask, changes, words):
    notes = ask("check", changes=changes)["notes"]
    assert len(notes) == len(words)
    assert all(word in note for note, word in zip(notes, words, strict=True))


def test_shapes_of_nested_batches():
    nested = {"image": torch.zeros(2, 3), "more": [torch.zeros(4, dtype=torch.int64), "name"]}
    assert _shape(nested) == {"image": "float32 [2, 3]", "more": ["int64 [4]", "str"]}


# ---- split ----


def test_a_split_is_described(ask):
    answer = ask("split")
    (fold,) = answer["report"]["folds"]
    assert {name: part["size"] for name, part in fold["parts"].items()} == {"train": 1438, "validation": 359}
    assert (answer["own_sources"], answer["leaks_between_sources"], answer["exported"]) == ({}, [], None)


@pytest.mark.parametrize(("fold", "described"), [(None, [0, 1, 2]), (1, [1])])
def test_all_folds_are_described_and_exported_unless_the_job_names_one(ask, job_dir, fold, described):
    split = FOLDS if fold is None else FOLDS | {"fold": fold}
    answer = ask("split", changes=data(split=split), export=str(job_dir / "split"))
    assert [one["fold"] for one in answer["report"]["folds"]] == described
    assert answer["exported"] == str(job_dir / "split")
    rows = pq.read_table(job_dir / "split" / "split.parquet", columns=["fold"])["fold"].to_pylist()
    assert (sorted(set(rows)), len(rows)) == (described, 1797 * len(described))


# ---- evaluate ----


def test_held_out_parts_are_evaluated_unless_one_is_named(ask, weights):
    every = ask("evaluate", weights=weights, part=None, source=None)
    assert every["samples"] == {"validation": 359}
    train = ask("evaluate", weights=weights, part="train", source=None)
    assert train["samples"] == {"train": 1438}
    assert train["metrics"]["train"] != every["metrics"]["validation"]


def test_other_data_is_evaluated_whole(ask, weights):
    answer = ask("evaluate", weights=weights, part=None, source=MLP["data"]["source"])
    parts = [ask("evaluate", weights=weights, part=name, source=None) for name in ("train", "validation")]
    assert answer["samples"] == {"data": 1797}
    right = [p["metrics"][n]["accuracy"] * p["samples"][n] for p in parts for n in p["samples"]]
    assert answer["metrics"]["data"]["accuracy"] == pytest.approx(sum(right) / 1797)


def test_columns_of_other_data_are_found_by_name(ask, weights, job_dir):
    """The weight of a sample is no input, and the order of columns does not matter."""
    rows = [(i % 7, i % 3, i % 2, i % 4) for i in range(40)]
    for name, order in (("t", (0, 1, 2, 3)), ("other", (3, 2, 1, 0))):
        lines = [",".join(str(row[i]) for i in order) for row in [("u", "v", "y", "w"), *rows]]
        (job_dir / f"{name}.csv").write_text("\n".join(lines) + "\n")
    source = {"kind": "csv", "path": "t.csv", "target": "y"}
    changes = {
        "model": {"name": "models.py:mlp", "args": {"inputs": 2, "classes": 2}},
        "data": {"source": source, "weight": "w"},
        "evaluate": {},
    }
    torch.manual_seed(0)
    made = {k: v for k, v in (MLP | changes).items() if v is not None}
    model = build_model(make_job(made, base_dir=str(job_dir)))
    save_file(model.state_dict(), job_dir / "w2.safetensors")
    answers = [
        ask(
            "evaluate", changes=changes, weights=str(job_dir / "w2.safetensors"), part=None, source=source | {"path": p}
        )
        for p in ("t.csv", "other.csv")
    ]
    assert answers[0] == answers[1]
    assert answers[0]["samples"] == {"data": 40}


def test_a_part_that_is_not_there_is_refused_with_those_that_are(ask, weights):
    with pytest.raises(ShoalError, match="no part 'test'") as caught:
        ask("evaluate", weights=weights, part="test", source=None)
    assert (caught.value.code, caught.value.where) == ("SH606", "--part")
    assert "train, validation" in caught.value.fix
