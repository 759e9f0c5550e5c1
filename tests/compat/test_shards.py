"""Data: what users bring."""

import numpy as np
import pytest

from tests.data.source_helpers import open_spec

pytestmark = pytest.mark.compat


@pytest.mark.compat("shards that `webdataset` wrote", "works", how="`ShardWriter`, `TarWriter`")
def test_shards_of_webdataset_hold_what_it_reads_from_them(tmp_path):
    import webdataset
    from PIL import Image

    rng = np.random.default_rng(3)
    with webdataset.ShardWriter(f"{tmp_path}/s-%03d.tar", maxcount=4) as writer:
        for number in range(10):
            image = Image.fromarray(rng.integers(0, 255, (6, 5, 3), dtype=np.uint8))
            values = rng.normal(size=3).astype(np.float32)
            name = ["cod", "eel"][number % 2]
            writer.write({"__key__": f"sea/{number:04}", "png": image, "cls": number % 3, "x.npy": values, "txt": name})
    shards = sorted(str(path) for path in tmp_path.glob("s-*.tar"))
    assert len(shards) == 3
    own = list(webdataset.WebDataset(shards, shardshuffle=False).decode("rgb"))
    spec = {"kind": "webdataset", "path": "s-*.tar", "inputs": ["png", "x.npy"]}
    classes = open_spec(tmp_path, **spec, target="cls")
    assert len(classes) == len(own) == 10
    batch = classes.take(np.arange(10))
    assert batch.target.tolist() == [sample["cls"] for sample in own]
    np.testing.assert_array_equal(batch.inputs[1].numpy(), [sample["x.npy"] for sample in own])
    found = batch.inputs[0].numpy().transpose(0, 2, 3, 1)
    np.testing.assert_allclose(found, [sample["png"] for sample in own], atol=1e-6)
    assert classes.column("key").tolist() == [sample["__key__"] for sample in own]
    words = open_spec(tmp_path, **spec, target="txt")
    assert [words.classes[number] for number in words.targets()] == [sample["txt"] for sample in own]
