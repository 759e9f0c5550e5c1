"""`shoal predict`: a row for each row of new data, the same bytes on any number of processes."""

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow.csv as pa_csv
import pyarrow.parquet as parquet
import pytest
import torch

import shoal
from shoal.errors import ShoalError
from shoal.jobs.predictions import predict, unlabelled_source
from shoal.spec.load import make_job
from shoal.storage.export import export
from tests.conftest import MLP

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


def test_sources_lose_their_target(job_dir):
    arrays = {"kind": "npz", "path": "a.npz", "inputs": "x", "target": "y"}
    np.savez(job_dir / "a.npz", x=np.zeros((4, 3)), y=np.zeros(4))
    job = make_job(LETTERS | {"data": {"source": arrays, "split": "holdout"}}, base_dir=job_dir)
    assert unlabelled_source(job, "b.npz", None)["target"] is None


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


def test_what_is_no_model_directory(tmp_path):
    (tmp_path / "model.json").write_text("[]")
    with pytest.raises(ShoalError) as refused:
        shoal.load(tmp_path)
    assert refused.value.code == "SH811"


@pytest.mark.long
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
def test_a_plain_model_has_no_form_of_hugging_face(trained, job_dir):
    with pytest.raises(ShoalError) as refused:
        export(trained, "hf", job_dir / "saved")
    assert refused.value.code == "SH810"
    assert not Path(job_dir / "saved").exists()
