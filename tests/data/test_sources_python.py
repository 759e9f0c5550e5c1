"""Datasets of the user's own."""

import textwrap

import numpy as np
import pytest
import torch

from shoal.data.source import open_source
from shoal.errors import ShoalError
from shoal.spec.sources.config import PythonSourceConfig

CODE = """
import torch
from torch.utils.data import Dataset, IterableDataset, TensorDataset


class Squares(Dataset):
    def __init__(self, n=5):
        self.n = n
        self.group = [i % 2 for i in range(n)]

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        return torch.tensor([float(i)]), i * i


class Two(Squares):
    def __getitem__(self, i):
        return torch.tensor([float(i)]), {"len": i}, float(i)


class Alone(Squares):
    def __getitem__(self, i):
        return {"x": torch.tensor([i])}


class Many(Squares):
    def __getitems__(self, ids):
        return [(torch.tensor([float(i)]), -i) for i in ids]


class Broken(Squares):
    def __getitem__(self, i):
        if i == 3:
            raise KeyError("no such thing")
        return super().__getitem__(i)


class BrokenMany(Squares):
    def __getitems__(self, ids):
        return [1 / 0 for i in ids]


class Ragged(Squares):
    def __getitem__(self, i):
        return torch.zeros(i + 1), 0


class Holder(Squares):
    # Attributes that hold something else than a value for each sample.

    def __init__(self):
        super().__init__(3)
        self.rows = [[1], [1, 2], [3]]
        self.tensors = [torch.zeros(2), torch.zeros(3), torch.zeros(1)]
        self.weights = torch.zeros(3, requires_grad=True)
        self.half = torch.zeros(3, dtype=torch.bfloat16)
        self.mean = torch.tensor(0.5)


class Gaps(Squares):
    def __getitem__(self, i):
        if i != 3:
            return super().__getitem__(i)


class Stream(IterableDataset):
    def __iter__(self):
        return iter([])


def tensors(n=4):
    return TensorDataset(torch.arange(n * 2.0).reshape(n, 2), torch.arange(n) * 10)


def unlabelled(n=4):
    return TensorDataset(torch.arange(n * 2.0).reshape(n, 2))


class Pictures(Squares):
    def __getitem__(self, i):
        from PIL import Image

        return Image.new("L", (2, 2)), i


def number():
    return 3


def nothing():
    return Squares(0)


def fails():
    raise OSError("disk on fire")


ready = tensors(3)
"""


@pytest.fixture
def opened(tmp_path):
    (tmp_path / "mine.py").write_text(textwrap.dedent(CODE))

    def opened(name, **args):
        spec = PythonSourceConfig(kind="python", factory={"name": f"mine.py:{name}", "args": args})
        return open_source(spec, base_dir=str(tmp_path))

    return opened


def test_pairs(opened):
    source = opened("Squares", n=4)
    batch = source.take(np.array([3, 1]))
    assert batch.inputs[0].tolist() == [[3], [1]]
    assert batch.target.tolist() == [9, 1]
    assert batch.size == 2
    assert source.per_sample
    assert source.column("target").tolist() == [0, 1, 4, 9]
    assert source.column("group").tolist() == [0, 1, 0, 1]
    assert source.column("size").tolist() == [4, 4, 4, 4]
    assert source.column("id").tolist() == [0, 1, 2, 3]
    with pytest.raises(ShoalError, match=r"SH303.*group"):
        source.column("grop")


def test_attributes_that_are_no_columns_are_left_alone(opened):
    """Rows of different lengths, as a dataset of texts holds them, and a mean of one number."""
    assert opened("Holder").own_columns() == ["group"]


def test_a_sample_that_is_none_is_named(opened):
    with pytest.raises(ShoalError, match="SH306 the dataset returns None for sample 3") as caught:
        opened("Gaps").take(np.array([1, 3, 4]))
    assert "`return`" in caught.value.fix


def test_other_samples(opened):
    two = opened("Two").take(np.array([1, 2]))
    assert two.inputs[1]["len"].tolist() == [1, 2]
    assert two.target.tolist() == [1, 2]
    alone = opened("Alone").take(np.array([1, 2]))
    assert alone.inputs[0]["x"].tolist() == [[1], [2]]
    assert alone.target is None
    tensor = opened("unlabelled").take(np.array([1, 2]))
    assert ([x.tolist() for x in tensor.inputs], tensor.target) == ([[[2.0, 3.0], [4.0, 5.0]]], None)


def test_pictures_are_to_be_made_tensors(opened):
    pytest.importorskip("PIL")
    with pytest.raises(ShoalError) as caught:
        opened("Pictures").take(np.array([1, 2]))
    assert caught.value.code == "SH306"
    assert "ToTensor()" in caught.value.fix
    assert opened("Many").take(np.array([2, 1])).target.tolist() == [-2, -1]


def test_tensor_datasets_are_indexed_directly(opened):
    source = opened("tensors", n=4)
    assert source.in_memory
    batch = source.take(np.array([3, 0]))
    assert torch.equal(batch.inputs[0], torch.tensor([[6.0, 7], [0, 1]]))
    assert batch.target.tolist() == [30, 0]
    assert source.column("target").tolist() == [0, 10, 20, 30]
    assert len(opened("ready")) == 3


@pytest.mark.parametrize(
    ("name", "code", "says", "line"),
    [
        ("Broken", "SH309", "sample 3: KeyError", 'raise KeyError("no such thing")'),
        ("BrokenMany", "SH309", "ZeroDivisionError", "1 / 0"),
        ("Ragged", "SH306", "do not make a batch", ""),
        ("Stream", "SH302", "empty", ""),
        ("number", "SH206", "int", ""),
        ("nothing", "SH302", "empty", ""),
        ("fails", "SH208", "disk on fire", "raise OSError"),
        ("absent", "SH202", "absent", ""),
    ],
)
def test_errors(opened, tmp_path, name, code, says, line):
    with pytest.raises(ShoalError) as caught:
        opened(name).take(np.arange(5))
    assert caught.value.code == code
    assert says in caught.value.message
    if line:
        file, number = caught.value.where.rsplit(":", 1)
        assert file == str(tmp_path / "mine.py")
        assert line in CODE.splitlines()[int(number) - 1]


def test_wrong_arguments(opened):
    with pytest.raises(ShoalError, match="SH205"):
        opened("Squares", m=4)


COLLATORS = """
import random
from collections import UserDict

import torch


class Table:  # what of a datasets.Dataset is used
    __module__ = "datasets.arrow_dataset"
    rows = {"words": ["a b", "c", "d e f", "g"], "label": ["good", "bad", "bad", "good"]}
    column_names = list(rows)
    features = {name: type("Value", (), {"dtype": "string"})() for name in rows}

    def __len__(self):
        return 4

    def __getitem__(self, key):
        if isinstance(key, str):
            return self.rows[key]
        ids = range(4)[key] if isinstance(key, slice) else key
        return {name: [values[i] for i in ids] for name, values in self.rows.items()}

    def with_format(self, kind):
        return self

    def unique(self, name):
        return sorted(set(self.rows[name]))


def table():
    return Table()


def collate(rows):
    lengths = torch.tensor([len(row["words"].split()) for row in rows])
    noise = torch.full_like(lengths, random.randrange(10**9))
    return UserDict(lengths=lengths, noise=noise, labels=torch.tensor([row["label"] for row in rows]))


class Rows(list):
    def __init__(self):
        super().__init__({"words": "a " * n, "label": n % 2} for n in range(1, 6))
"""


@pytest.mark.parametrize(("name", "labels"), [("table", [0, 1]), ("Rows", [0, 0])])
def test_collators_of_transformers(tmp_path, name, labels):
    """They get rows as dicts and return an object that is like a dict, but none: its labels are the target."""
    (tmp_path / "own.py").write_text(COLLATORS)
    spec = PythonSourceConfig(kind="python", factory=f"own.py:{name}", collate="own.py:collate")
    source = open_source(spec, base_dir=str(tmp_path))
    batch = source.take(np.array([1, 3]))
    (inputs,) = batch.inputs
    assert type(inputs) is dict
    assert inputs["lengths"].tolist() == ([1, 1] if name == "table" else [2, 4])
    assert batch.target.tolist() == inputs["labels"].tolist() == labels
    assert batch.to("meta").inputs[0]["lengths"].device.type == "meta"
    assert len(source.sizes()) == len(source)
    assert source.per_sample  # they may draw: each batch has its own random numbers, whoever makes it
