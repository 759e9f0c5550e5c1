"""A trained model: predictions, copies and other formats.

`shoal predict` writes a row for each row of new data, the same bytes on any number of processes.
"""

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as parquet
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import shoal
from shoal.errors import ShoalError
from shoal.jobs.predictions import _write as _write_file
from shoal.jobs.predictions import predict, unlabelled_source
from shoal.spec.data import DataConfig
from shoal.spec.load import make_job
from shoal.storage.export import export
from shoal.tasks.own_loss import OwnLossTask
from shoal.tasks.task import PlainTask, Task
from shoal.train.predict import prediction_columns
from tests.conftest import MLP
from tests.fixtures import user_data
from tests.jobs.past_run import call_verb

LETTERS = MLP | {
    "model": {"name": "models.py:mlp", "args": {"inputs": 3, "classes": 2}},
    "data": {"source": {"kind": "csv", "path": "train.csv", "target": "kind"}, "split": "holdout"},
    "batch_size": 10,
    "steps": 6,
    "lanes": 2,
    "evaluate": {"every_steps": 6},
}


@pytest.fixture
def trained(run, job_dir):
    """A finished run on a table with numbers a, b, c and the words 'eel' and 'cod' as target."""
    rng = np.random.default_rng(1)
    rows = [(*rng.normal(size=3).round(3), "eel" if rng.random() < 0.5 else "cod") for _ in range(60)]
    _write(job_dir / "train.csv", "a,b,c,kind", rows)
    outcome = run(LETTERS)
    assert outcome.status == "finished", outcome.error
    return outcome.paths


def _write(path, head, rows):
    path.write_text("\n".join([head, *(",".join(map(str, row)) for row in rows)]) + "\n")


def _new_rows(count):
    rng = np.random.default_rng(2)
    return [tuple(rng.normal(size=3).round(3)) for _ in range(count)]


@pytest.mark.compat_row("predictions of unlabelled data", "works", how="`shoal predict RUN --data new.csv --workers 2`")
def test_a_row_for_each_row_in_the_same_bytes(trained, job_dir, fork_server):
    """The new table has no target, its columns in another order, and one more."""
    rows = _new_rows(47)
    _write(job_dir / "new.csv", "extra,c,a,b", [(7, c, a, b) for a, b, c in rows])
    outs = []
    for workers in (1, 2, 3):
        out = job_dir / f"{workers}.parquet"
        found = predict(trained, data=str(job_dir / "new.csv"), out=out, workers=workers, fork_server=fork_server)
        assert found.samples == 47
        outs.append(out.read_bytes())
    assert outs[0] == outs[1] == outs[2]
    table = parquet.read_table(job_dir / "1.parquet").to_pydict()
    model = shoal.load(trained.root)
    with torch.no_grad():
        wanted = model(torch.tensor(rows, dtype=torch.float32)).softmax(1)
    assert table["row"] == list(range(47))
    assert table["prediction"] == [("cod", "eel")[i] for i in wanted.argmax(1).tolist()]
    torch.testing.assert_close(torch.tensor(table["probabilities"]), wanted)


def test_a_process_that_dies_is_replaced(trained, job_dir, fork_server):
    _write(job_dir / "new.csv", "a,b,c", _new_rows(25))
    calm, torn = job_dir / "calm.csv", job_dir / "torn.csv"
    predict(trained, data=str(job_dir / "new.csv"), out=calm, workers=2, fork_server=fork_server)
    text = trained.job.read_text().replace("data:\n", "data:\n  transform: faults.py:die_once\n", 1)
    trained.job.write_text(text)
    found = predict(trained, data=str(job_dir / "new.csv"), out=torn, workers=2, fork_server=fork_server)
    assert found.deaths_survived == 1
    assert torn.read_bytes() == calm.read_bytes()
    assert pa_csv.read_csv(torn).column_names == ["row", "prediction", "probabilities_0", "probabilities_1"]


@pytest.mark.parametrize(
    ("data", "out", "code"),
    [("", "a.parquet", "SH812"), ("new.csv", "a.txt", "SH609"), ("nowhere.csv", "a.parquet", "SH301")],
)
def test_what_is_refused(trained, job_dir, fork_server, data, out, code):
    _write(job_dir / "new.csv", "a,b,c", _new_rows(2))
    place = str(job_dir / data) if data else ""
    with pytest.raises(ShoalError) as refused:
        predict(trained, data=place, out=job_dir / out, fork_server=fork_server)
    assert refused.value.code == code
    assert not (job_dir / out).exists()


def test_a_bad_row_is_an_error_also_where_the_job_skips_some(run, job_dir, fork_server):
    _write(job_dir / "train.csv", "a,b,c,kind", [(i, 2, 3, "eel" if i % 2 else "cod") for i in range(40)])
    outcome = run(LETTERS, data=LETTERS["data"] | {"on_bad_row": "skip"})
    assert outcome.status == "finished", outcome.error
    _write(job_dir / "new.csv", "a,b,c", [(1, 2, 3), (1, "", 3)])
    with pytest.raises(ShoalError) as refused:
        predict(outcome.paths, data=str(job_dir / "new.csv"), out=job_dir / "out.csv", fork_server=fork_server)
    assert refused.value.code in ("SH304", "SH305")
    assert refused.value.fix.startswith("Mend or remove the row.")


@pytest.mark.parametrize("longest", [2, 4])
def test_lists_of_different_lengths_are_no_csv(tmp_path, longest):
    """Sequences are padded batch by batch, so the lists of one batch may be longer than those of the next."""
    numbers = [pa.array([[1.0] * 3] * 2), pa.array([[1.0] * longest] * 2)]
    batches = [pa.record_batch({"row": pa.array([0, 1]), "prediction": column}) for column in numbers]
    with pytest.raises(ShoalError, match=r"SH609.*Use \.parquet"):
        _write_file(iter(batches), tmp_path / "out.csv")
    assert not list(tmp_path.iterdir())


class OfClasses(Task):
    predicts_classes = True


class Chance(Task):
    logits = False


def _plain(loss):
    return PlainTask(nn.Linear(3, 1), loss)


@pytest.mark.parametrize(
    ("task", "output", "prediction"),
    [
        (_plain(nn.BCEWithLogitsLoss()), [[2.0], [-2.0]], ["eel", "cod"]),
        (_plain(nn.BCELoss()), [[0.88], [0.12]], ["eel", "cod"]),
        (Chance(), [0.88, 0.12], ["eel", "cod"]),
        (_plain(nn.CrossEntropyLoss()), [[0.0, 2.0], [0.0, -2.0]], ["eel", "cod"]),
        (_plain(nn.NLLLoss()), [[-2.12693, -0.12693], [-0.12693, -2.12693]], ["eel", "cod"]),
        (OfClasses(), [[0.0, 2.0], [0.0, -2.0]], ["eel", "cod"]),
        (_plain(nn.MSELoss()), [[0.5], [0.25]], [0.5, 0.25]),
        (OwnLossTask(nn.Linear(3, 1), lambda example: {}), [[0.5], [0.25]], [0.5, 0.25]),
    ],
)
def test_each_way_to_write_a_loss_predicts_the_same(task, output, prediction):
    columns = prediction_columns(torch.tensor(output), 2, task, ["cod", "eel"])
    assert columns["prediction"].to_pylist() == prediction
    for chance in columns.keys() & {"probability", "probabilities"}:
        found = torch.tensor(columns[chance].to_pylist())
        torch.testing.assert_close(found.reshape(2, -1)[:, -1], torch.tensor([0.88, 0.12]), atol=1e-3, rtol=0)


def test_the_dataset_of_the_job_keeps_its_arguments(job_dir):
    source = {"kind": "python", "factory": {"name": "user_data.py:Numbers", "args": {"count": 30}}, "window": 8}
    job = make_job(LETTERS | {"data": {"source": source | {"length": 30}, "split": "holdout"}}, base_dir=job_dir)
    again = unlabelled_source(job, "user_data.py:Numbers")
    assert (again["factory"]["args"], again["length"], again["window"]) == ({"count": 30}, 30, 8)
    other = unlabelled_source(job, "user_data.py:Sequences")
    assert (other["factory"], other.get("length"), other["window"]) == ({"name": "user_data.py:Sequences"}, None, 8)


def test_sources_lose_their_target(job_dir):
    arrays = {"kind": "npz", "path": "a.npz", "inputs": "x", "target": "y"}
    np.savez(job_dir / "a.npz", x=np.zeros((4, 3)), y=np.zeros(4))
    job = make_job(LETTERS | {"data": {"source": arrays, "split": "holdout"}}, base_dir=job_dir)
    assert unlabelled_source(job, "b.npz")["target"] is None


@pytest.mark.parametrize(("kind", "data"), [("csv", "new.parquet"), ("parquet", "new.csv")])
def test_new_rows_may_be_in_the_other_format_of_tables(job_dir, kind, data):
    own = {"delimiter": ";", "encoding": "cp1252", "null_values": ["?"]} if kind == "csv" else {}
    (job_dir / f"rows.{kind}").touch()
    table = {"kind": kind, "path": f"rows.{kind}", "inputs": ["x"], "target": "y", "missing": {"x": "mean"}}
    job = make_job(LETTERS | {"data": {"source": table | own, "split": "holdout"}}, base_dir=job_dir)
    read = DataConfig.model_validate({"source": unlabelled_source(job, data)}).source
    assert (read.kind, read.inputs, read.target, read.missing) == (Path(data).suffix[1:], ["x"], None, {"x": "mean"})


def test_new_rows_are_encoded_as_those_of_the_training(run, job_dir, fork_server):
    """Weights, categories and gaps: the new table has its columns in another order, and an unknown city."""
    rng = np.random.default_rng(1)
    cities = ["Oslo", "Rome"]
    rows = [(i % 4, "" if i % 5 == 0 else i, cities[i % 2], "eel" if rng.random() < 0.5 else "cod") for i in range(60)]
    _write(job_dir / "train.csv", "weight,a,city,kind", rows)
    source = LETTERS["data"]["source"] | {
        "encode": {"city": "onehot"},
        "missing": {"a": "mean", "city": "unknown"},
    }
    outcome = run(LETTERS, data={"source": source, "split": "holdout", "weight": "weight"})
    assert outcome.status == "finished", outcome.error
    _write(job_dir / "new.csv", "city,weight,a", [("Rome", 7, 2), ("Bonn", 7, ""), ("Oslo", 7, 50)])
    outs = [job_dir / f"{workers}.parquet" for workers in (1, 2)]
    for workers, out in enumerate(outs, start=1):
        predict(outcome.paths, data=str(job_dir / "new.csv"), out=out, workers=workers, fork_server=fork_server)
    assert outs[0].read_bytes() == outs[1].read_bytes()
    mean = float(np.mean([row[1] for row in rows if row[1] != ""]))
    with torch.no_grad():
        encoded = torch.tensor([[2, 0, 1], [mean, 0, 0], [50, 1, 0]])
        wanted = shoal.load(outcome.paths.root)(encoded).softmax(1)
    torch.testing.assert_close(torch.tensor(parquet.read_table(outs[0])["probabilities"].to_pylist()), wanted)


@pytest.mark.long
def test_a_run_without_a_model_yet_reads_new_rows_as_its_training_data(run, job_dir, fork_server):
    """The new table has one city and one number: what is fitted to it is not what the checkpoint was trained with."""
    rng = np.random.default_rng(1)
    cities = ["Bergen", "Oslo", "Rome"]
    rows = [(i, cities[i % 3], "eel" if rng.random() < 0.5 else "cod") for i in range(60)]
    _write(job_dir / "train.csv", "a,city,kind", rows)
    source = LETTERS["data"]["source"] | {"encode": {"city": "onehot", "a": "standard"}}
    model = {"name": "models.py:mlp", "args": {"inputs": 4, "classes": 2}}
    data = {"source": source, "split": "holdout"}
    outcome = run(LETTERS, model=model, data=data, checkpoint={"every": "6 steps"})
    assert outcome.status == "finished", outcome.error
    _write(job_dir / "new.csv", "a,city", [(7, city) for city in ("Rome", "Rome", "Oslo", "Bergen")])
    outs = [job_dir / f"{number}.parquet" for number in range(2)]
    predict(outcome.paths, data=str(job_dir / "new.csv"), out=outs[0], fork_server=fork_server)
    shutil.move(outcome.paths.model, job_dir / "away")
    predict(outcome.paths, data=str(job_dir / "new.csv"), out=outs[1], workers=2, fork_server=fork_server)
    assert outs[0].read_bytes() == outs[1].read_bytes()
    assert set(parquet.read_table(outs[1])["prediction"].to_pylist()) <= {"cod", "eel"}


@pytest.mark.compat_row("predictions of unlabelled data", "works", how="`shoal predict RUN --data new.csv --workers 2`")
def test_images_without_labels(run, job_dir, fork_server):
    """They lie in one directory, whose name is no class; each row names its file."""
    pillow = pytest.importorskip("PIL.Image")
    rng = np.random.default_rng(3)

    def paint(name):
        (job_dir / name).parent.mkdir(parents=True, exist_ok=True)
        pillow.fromarray(rng.integers(0, 255, (8, 8), dtype=np.uint8)).save(job_dir / name)

    for number in range(24):
        paint(f"pictures/{'cat' if number % 2 else 'dog'}/{number}.png")
    new = [f"new/{number}.png" for number in range(7)]
    for name in new:
        paint(name)
    source = {"kind": "images", "path": "pictures", "channels": 1}
    model = {"name": "models.py:mlp", "args": {"inputs": 64, "classes": 2}}
    data = {"source": source, "split": "holdout", "transform": "user_data.py:flat"}
    outcome = run(LETTERS, model=model, data=data, batch_size=4, steps=3)
    assert outcome.status == "finished", outcome.error
    outs = [job_dir / f"{workers}.parquet" for workers in (1, 2)]
    for workers, out in enumerate(outs, start=1):
        predict(outcome.paths, data=str(job_dir / "new"), out=out, workers=workers, fork_server=fork_server)
    assert outs[0].read_bytes() == outs[1].read_bytes()
    table = parquet.read_table(outs[0]).to_pydict()
    assert table["path"] == [str(job_dir / name) for name in new]
    assert set(table["prediction"]) <= {"cat", "dog"}


def test_samples_of_different_lengths_are_collated_as_in_training(run, job_dir, fork_server):
    source = {"kind": "python", "factory": "user_data.py:Sequences", "collate": "user_data.py:pad"}
    outcome = run(LETTERS, model="user_data.py:MeanOfWords", data={"source": source, "split": "holdout"})
    assert outcome.status == "finished", outcome.error
    out = job_dir / "out.parquet"
    found = predict(outcome.paths, data="user_data.py:Sequences", out=out, workers=2, fork_server=fork_server)
    assert found.samples == 120
    first = user_data.pad([user_data.Sequences()[0]])[:2]
    with torch.no_grad():
        wanted = shoal.load(outcome.paths.root)(*first).softmax(1)[0]
    torch.testing.assert_close(torch.tensor(parquet.read_table(out)["probabilities"][0].as_py()), wanted)


@pytest.mark.long
def test_a_copied_model_directory_loads_alone(trained, job_dir, tmp_path_factory):
    """In another process, with the job's directory gone: the object is of the user's own class."""
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    shutil.copytree(trained.model, elsewhere / "model")
    before = shoal.load(trained.root).state_dict()
    shutil.move(job_dir, f"{job_dir}-away")
    program = (
        "import shoal, torch\n"
        "model = shoal.load('model')\n"
        "total = sum(float(v.double().sum()) for v in model.state_dict().values())\n"
        "print(type(model).__name__, model.training, total)\n"
    )
    said = subprocess.run([sys.executable, "-c", program], cwd=elsewhere, capture_output=True, text=True)
    wanted = sum(float(v.double().sum()) for v in before.values())
    assert said.stdout.split() == ["Sequential", "False", str(wanted)], said.stderr


OWN = """
from torch import nn

from parts.blocks import block


class Own(nn.Module):
    def __init__(self, inputs):
        super().__init__()
        self.body = block(inputs)
        self.head = nn.Linear(8, 10)

    def forward(self, x):
        return self.head(self.body(x))

    def describe(self):
        return "mine"
"""


@pytest.mark.long
@pytest.mark.compat_row("a copied `model/` directory", "works", how="`shoal.load(directory)`: your own class")
def test_a_model_of_a_class_of_ones_own_comes_back_as_that_class(run, job_dir, tmp_path_factory):
    """Its file imports a module of a directory beside it: that travels with the model."""
    (job_dir / "own.py").write_text(OWN)
    (job_dir / "parts").mkdir()
    (job_dir / "parts" / "blocks.py").write_text(
        "from torch import nn\n\n\ndef block(inputs):\n    return nn.Sequential(nn.Linear(inputs, 8), nn.ReLU())\n"
    )
    outcome = run(MLP, model={"name": "own.py:Own", "args": {"inputs": 64}}, steps=3, evaluate={"every_steps": 3})
    assert outcome.status == "finished", outcome.error
    here = shoal.load(outcome.paths.root)
    assert (type(here).__name__, here.describe()) == ("Own", "mine")
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    shutil.copytree(outcome.paths.model, elsewhere / "model")
    wanted = here(torch.ones(1, 64)).sum().item()
    shutil.move(job_dir, f"{job_dir}-away")
    program = (
        "import shoal, torch\n"
        "model = shoal.load('model')\n"
        "print(type(model).__name__, model.describe(), model(torch.ones(1, 64)).sum().item())\n"
    )
    said = subprocess.run([sys.executable, "-c", program], cwd=elsewhere, capture_output=True, text=True)
    assert said.stdout.split() == ["Own", "mine", str(wanted)], said.stderr


def test_what_is_no_model_directory(tmp_path):
    (tmp_path / "model.json").write_text("[]")
    with pytest.raises(ShoalError) as refused:
        shoal.load(tmp_path)
    assert refused.value.code == "SH811"


@pytest.mark.long
@pytest.mark.compat_row("ONNX, `torch.export`, safetensors", "works", how="`shoal export RUN --format onnx`")
def test_the_verbs(trained, job_dir, capsys, monkeypatch):
    runs = trained.root.parent
    _write(job_dir / "new.csv", "a,b,c", _new_rows(1))
    out, weights = job_dir / "out.parquet", job_dir / "w.safetensors"
    words = ("predict", trained.name, "--data", job_dir / "new.csv", "--out", out, "--workers", 2, "--runs", runs)
    assert call_verb(capsys, monkeypatch, *words)[:2] == (0, f"1 prediction: {out}\n")
    assert parquet.read_table(out).num_rows == 1
    words = ("export", trained.name, "--format", "safetensors", "--out", weights, "--runs", runs)
    assert call_verb(capsys, monkeypatch, *words)[:2] == (0, f"{weights}\n")
    own, found = shoal.load(trained.root).state_dict(), load_file(weights)
    assert own.keys() == found.keys()
    assert all(torch.equal(value, found[name]) for name, value in own.items())


@pytest.mark.long
@pytest.mark.compat_row("ONNX, `torch.export`, safetensors", "works", how="`shoal export RUN --format onnx`")
@pytest.mark.parametrize("kind", ["onnx", "pt2"])
def test_exported_models_compute_the_same(trained, job_dir, kind):
    target = job_dir / f"model.{kind}"
    export(trained, kind, target)
    inputs = torch.randn(5, 3, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        wanted = shoal.load(trained.root)(inputs)
    if kind == "pt2":
        found = torch.export.load(target).module()(inputs)
    else:
        import onnxruntime

        session = onnxruntime.InferenceSession(str(target))
        found = torch.from_numpy(session.run(None, {session.get_inputs()[0].name: inputs.numpy()})[0])
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.long
@pytest.mark.compat_row("`--format hf` of a plain model", "refused SH810")
def test_a_plain_model_has_no_form_of_hugging_face(trained, job_dir):
    with pytest.raises(ShoalError) as refused:
        export(trained, "hf", job_dir / "saved")
    assert refused.value.code == "SH810"
    assert not Path(job_dir / "saved").exists()
