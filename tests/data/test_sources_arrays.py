"""Arrays, images and text: npy, npz, idx, scikit-learn's sets, folders of images, characters and bytes."""

import gzip
import struct
import sys

import numpy as np
import pytest
import torch
from PIL import Image

from shoal.data.sources import array_files, text
from shoal.errors import ShoalError
from tests.data.source_helpers import open_failure, open_spec

# ---- npy and npz ----


@pytest.mark.parametrize(
    ("dtype", "wanted"),
    [
        ("f8", torch.float32),
        ("f4", torch.float32),
        ("f2", torch.float32),
        (">f4", torch.float32),
        ("u1", torch.float32),
        ("?", torch.float32),
        ("i8", torch.int64),
        ("u2", torch.int64),
        ("i4", torch.int64),
    ],
)
@pytest.mark.parametrize("kind", ["npy", "npz", "compressed"])
@pytest.mark.parametrize("held_bytes", [0, 1 << 20])
def test_arrays_of_every_type(tmp_path, dtype, wanted, kind, held_bytes, monkeypatch):
    monkeypatch.setattr(array_files, "HELD_BYTES", held_bytes)
    x = np.arange(24).reshape(6, 2, 2).astype(dtype)
    y = np.arange(6) * 10
    if kind == "npy":
        np.save(tmp_path / "x.npy", x)
        np.save(tmp_path / "y.npy", y)
        source = open_spec(tmp_path, kind="npy", path="x.npy", target="y.npy")
    else:
        save = np.savez if kind == "npz" else np.savez_compressed
        save(tmp_path / "a.npz", x=x, y=y, group=np.arange(6) % 2)
        source = open_spec(tmp_path, kind="npz", path="a.npz")
        assert source.column("group").tolist() == [0, 1] * 3
    if dtype != ">f4":
        assert source.in_memory == (kind == "compressed" or held_bytes > 0)
    batch = source.take(np.array([5, 0, 5]))
    assert batch.inputs[0].dtype == wanted
    assert np.array_equal(batch.inputs[0].numpy(), x[[5, 0, 5]].astype(batch.inputs[0].numpy().dtype))
    assert batch.target.tolist() == [50, 0, 50]
    assert source.column("target").tolist() == y.tolist()
    assert set(source.column("size")) == {4 * x.dtype.itemsize} or source.in_memory


def test_fortran_order_and_several_inputs(tmp_path):
    a = np.asfortranarray(np.arange(12, dtype=np.float32).reshape(4, 3))
    np.savez(tmp_path / "a.npz", a=a, b=np.ones((4, 2), np.float32))
    source = open_spec(tmp_path, kind="npz", path="a.npz", inputs=["a", "b"], target=None)
    batch = source.take(np.array([2, 1]))
    assert batch.inputs[0].tolist() == a[[2, 1]].tolist()
    assert batch.inputs[1].shape == (2, 2)
    assert batch.target is None


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_bad_rows_of_arrays(tmp_path, save):
    x = np.ones((5, 2), np.float32)
    x[3, 1] = np.nan
    save(tmp_path / "a.npz", x=x, y=np.arange(5))
    wrong = open_failure(tmp_path, kind="npz", path="a.npz")
    assert wrong.code == "SH305"
    assert "row 3" in wrong.message
    source = open_spec(tmp_path, on_bad_row="skip", kind="npz", path="a.npz")
    assert source.skipped_rows == 1
    assert source.take(np.arange(4)).target.tolist() == [0, 1, 2, 4]
    assert source.column("y").tolist() == source.column("target").tolist() == [0, 1, 2, 4]


def test_errors_of_array_files(tmp_path):
    def code(**spec):
        return open_failure(tmp_path, **spec).code

    np.save(tmp_path / "x.npy", np.ones((3, 2)))
    np.save(tmp_path / "y.npy", np.ones(4))
    np.save(tmp_path / "none.npy", np.ones((0, 2)))
    np.save(tmp_path / "words.npy", np.array(["a", "b"]))
    np.save(tmp_path / "one.npy", np.array(1.0))
    np.savez(tmp_path / "a.npz", x=np.ones(3), y=np.ones(3))
    whole = (tmp_path / "x.npy").read_bytes()
    (tmp_path / "cut.npy").write_bytes(whole[:-8])
    (tmp_path / "text.npy").write_text("hello")
    (tmp_path / "text.npz").write_text("hello")
    assert code(kind="npy", path="z.npy") == "SH301"
    assert code(kind="npy", path="none.npy") == "SH302"
    assert code(kind="npy", path="x.npy", target="y.npy") == "SH306"
    assert code(kind="npy", path="one.npy") == "SH306"
    assert code(kind="npy", path="words.npy") == "SH310"
    assert code(kind="npy", path="cut.npy") == "SH307"
    assert code(kind="npy", path="text.npy") == "SH307"
    assert code(kind="npy", path="a.npz") == "SH307"
    assert code(kind="npz", path="text.npz") == "SH307"
    assert code(kind="npz", path="x.npy") == "SH307"
    assert code(kind="npz", path="a.npz", inputs="images") == "SH303"
    with pytest.raises(ShoalError, match="SH303"):
        open_spec(tmp_path, kind="npy", path="x.npy").column("target")


# ---- idx ----


def idx(array, code):
    return struct.pack(f">BBBB{array.ndim}I", 0, 0, code, array.ndim, *array.shape) + array.tobytes()


@pytest.mark.parametrize("packed", [False, True])
def test_idx(tmp_path, packed):
    images = np.arange(3 * 4 * 5, dtype=np.uint8).reshape(3, 4, 5)
    write = gzip.compress if packed else bytes
    (tmp_path / "images").write_bytes(write(idx(images, 8)))
    (tmp_path / "labels").write_bytes(write(idx(np.array([7, 8, 9], np.uint8), 8)))
    source = open_spec(tmp_path, kind="idx", path="images", target="labels")
    assert source.in_memory
    batch = source.take(np.array([2, 0]))
    assert batch.inputs[0].shape == (2, 1, 4, 5)
    assert torch.equal(batch.inputs[0][0, 0], torch.from_numpy(images[2]).float() / 255)
    assert batch.target.tolist() == [9, 7]
    assert source.column("size")[0] == 20


def test_errors_of_idx(tmp_path):
    images = idx(np.zeros((3, 2, 2), np.uint8), 8)
    files = {
        "images": images,
        "labels": idx(np.zeros(4, np.uint8), 8),
        "cut": images[:-1],
        "header": images[:7],
        "text": b"hello world",
        "gz": gzip.compress(images)[:-9],
        "none": idx(np.zeros((0, 2, 2), np.uint8), 8),
    }
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    for name, code in {
        "cut": "SH307",
        "header": "SH307",
        "text": "SH307",
        "gz": "SH307",
        "none": "SH302",
    }.items():
        assert open_failure(tmp_path, kind="idx", path=name).code == code, name
    assert open_failure(tmp_path, kind="idx", path="images", target="labels").code == "SH306"


# ---- scikit-learn ----


@pytest.mark.parametrize(
    ("name", "shape", "dtype"),
    [
        ("digits", (1797, 64), torch.int64),
        ("iris", (150, 4), torch.int64),
        ("diabetes", (442, 10), torch.float32),
    ],
)
def test_builtin_sets(tmp_path, name, shape, dtype):
    source = open_spec(tmp_path, kind="sklearn", name=name)
    batch = source.take(np.arange(len(source)))
    assert batch.inputs[0].shape == shape
    assert batch.inputs[0].dtype == torch.float32
    assert batch.target.dtype == dtype
    first = source.own_columns()[0]
    assert source.column(first).tolist() == batch.inputs[0][:, 0].tolist()


# ---- images ----


def paint(tmp_path, name, size=(4, 3), colour=(255, 0, 51)):
    path = tmp_path / "pictures" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).save(path)


def test_images(tmp_path):
    for name in ("dog/1.png", "cat/1.png", "cat/2.PNG"):
        paint(tmp_path, name)
    (tmp_path / "pictures" / "notes.txt").write_text("not an image")
    source = open_spec(tmp_path, kind="images", path="pictures")
    assert source.classes == ("cat", "dog")
    assert source.per_sample
    batch = source.take(np.array([2, 0]))
    assert batch.target.tolist() == [1, 0]
    assert batch.inputs[0].shape == (2, 3, 3, 4)
    assert torch.allclose(batch.inputs[0][0, :, 0, 0], torch.tensor([1, 0, 0.2]))
    assert source.column("class").tolist() == ["cat", "cat", "dog"]
    assert source.column("size").min() > 0
    grey = open_spec(tmp_path, kind="images", path="pictures", channels=1, size=[8, 6])
    assert grey.take(np.array([1])).inputs[0].shape == (1, 1, 8, 6)


def test_errors_of_images(tmp_path, monkeypatch):
    paint(tmp_path, "a/1.png")
    paint(tmp_path, "b/2.png", size=(5, 5))
    wrong = open_failure(tmp_path, kind="images", path="pictures")
    assert wrong.code == "SH306"
    assert "size" in wrong.fix
    assert wrong.where.endswith("2.png")
    (tmp_path / "pictures" / "a" / "3.png").write_text("broken")
    wrong = open_failure(tmp_path, kind="images", path="pictures", size=[2, 2])
    assert wrong.code == "SH307"
    assert wrong.where.endswith("3.png")
    source = open_spec(tmp_path, on_bad_row="skip", kind="images", path="pictures", size=[2, 2])
    assert (len(source), source.skipped_rows) == (2, 1)
    assert source.take(np.arange(2)).target.tolist() == [0, 1]
    paint(tmp_path, "../other/c/1.png")
    assert open_failure(tmp_path, kind="images", path="other", training_source=source).code == "SH310"
    (tmp_path / "nothing").mkdir()
    assert open_failure(tmp_path, kind="images", path="nothing").code == "SH301"
    monkeypatch.setitem(sys.modules, "PIL", None)
    wrong = open_failure(tmp_path, kind="images", path="pictures")
    assert wrong.code == "SH207"
    assert "shoal[images]" in wrong.fix


# ---- text ----


@pytest.fixture(params=["memory", "cache"])
def storage(request, monkeypatch):
    if request.param == "cache":
        monkeypatch.setattr(text, "SMALL_BYTES", 0)
        monkeypatch.setattr(text, "_CHUNK", 5)
    return request.param


def test_characters(tmp_path, storage):
    (tmp_path / "a.txt").write_text("hällo wörld\n", encoding="utf-8")
    source = open_spec(tmp_path, kind="text", path="a.txt", context=4)
    words = source.vocabulary
    assert words == tuple(sorted(set("hällo wörld\n")))
    assert len(source) == 2
    batch = source.take(np.array([1, 0]))
    read = ["".join(words[int(t)] for t in row) for row in batch.inputs[0]]
    shifted = ["".join(words[int(t)] for t in row) for row in batch.target]
    assert read == ["o wö", "häll"]
    assert shifted == [" wör", "ällo"]
    assert batch.inputs[0].dtype == torch.int64
    assert source.column("size").tolist() == [4, 4]
    close = open_spec(tmp_path, kind="text", path="a.txt", context=4, stride=1)
    assert len(close) == 8


def test_bytes(tmp_path, storage):
    (tmp_path / "a.txt").write_bytes(bytes(range(250, 256)) + b"\0")
    source = open_spec(tmp_path, kind="text", path="a.txt", context=3, level="byte")
    assert source.take(np.array([1])).inputs[0].tolist() == [[253, 254, 255]]
    assert source.take(np.array([1])).target.tolist() == [[254, 255, 0]]


def test_text_of_validation_has_the_tokens_of_training(tmp_path, storage):
    (tmp_path / "a.txt").write_text("abcdef")
    (tmp_path / "b.txt").write_text("fed")
    (tmp_path / "c.txt").write_text("fez")
    train = open_spec(tmp_path, kind="text", path="a.txt", context=2)
    valid = open_spec(tmp_path, kind="text", path="b.txt", context=2, training_source=train)
    assert valid.take(np.array([0])).inputs[0].tolist() == [[5, 4]]
    assert open_failure(tmp_path, kind="text", path="c.txt", context=2, training_source=train).code == "SH310"


def test_errors_of_text(tmp_path, storage):
    (tmp_path / "a.txt").write_bytes(b"caf\xe9 au lait")
    wrong = open_failure(tmp_path, kind="text", path="a.txt", context=2)
    assert wrong.code == "SH307"
    assert "UTF-8" in wrong.message
    assert open_failure(tmp_path, kind="text", path="a.txt", context=100, level="byte").code == "SH306"
    (tmp_path / "none.txt").write_bytes(b"")
    assert open_failure(tmp_path, kind="text", path="none.txt").code == "SH302"
