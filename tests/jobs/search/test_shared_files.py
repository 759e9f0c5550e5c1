"""Equal tensors of several trials are stored once, and count once."""

import pytest

from shoal.jobs.search.journal import ForgottenRow, read_rows, rows_of
from shoal.jobs.search.shared_files import SharedFiles, file_sizes, total_bytes
from shoal.spec.run_paths import RunPaths
from tests.jobs.search.test_search import kept_bytes

DIGESTS = {"same": "aa" * 32, "own": "bb" * 32}


def store(root, **contents):
    paths = RunPaths(root)
    for name, content in contents.items():
        file = paths.checkpoints / "blobs" / DIGESTS[name][:2] / DIGESTS[name]
        file.parent.mkdir(parents=True)
        file.write_bytes(content)
    return paths


def blob(paths, name):
    return paths.checkpoints / "blobs" / DIGESTS[name][:2] / DIGESTS[name]


def test_equal_files_become_one_and_each_store_stays_whole(tmp_path):
    first, second = (store(tmp_path / name, same=b"x" * 1000, own=name.encode()) for name in ("a", "b"))
    shared = SharedFiles()
    for paths in (first, second, second):
        shared.share(paths)
    assert blob(first, "same").samefile(blob(second, "same"))
    assert total_bytes(map(file_sizes, (first, second))) == 1002
    blob(first, "same").unlink()
    assert blob(second, "same").read_bytes() == b"x" * 1000
    third = store(tmp_path / "c", same=b"x" * 1000)
    shared.share(third)
    assert not blob(third, "same").samefile(blob(second, "same"))  # its owner was gone: it is the owner now
    shared.share(second)
    assert blob(third, "same").samefile(blob(second, "same"))


def test_a_damaged_file_replaces_no_sound_one(tmp_path):
    damaged, sound = store(tmp_path / "a", same=b"y" * 1000), store(tmp_path / "b", same=b"x" * 1000)
    shared = SharedFiles()
    shared.share(damaged)
    shared.share(sound)
    assert blob(sound, "same").read_bytes() == b"x" * 1000


FROZEN = """
from torch import nn


class Frozen(nn.Module):
    def __init__(self, width=8000):
        super().__init__()
        self.base, self.head = nn.Linear(64, width), nn.Linear(width, 10)
        self.base.requires_grad_(False)
        self.head.requires_grad_(True)

    def forward(self, images):
        return self.head(self.base(images.flatten(1)).relu())
"""


@pytest.mark.long
def test_the_frozen_layers_of_all_trials_are_stored_once(search, job_dir):
    """2 MB are frozen, about 1 MB is trained: eight checkpoints fit into 12 MB, which would hold four."""
    (job_dir / "frozen.py").write_text(FROZEN)
    asked = {"budget": "8 trials", "keep": "12 MB", "policy": {"kind": "full", "sampler": "random"}}
    outcome = search(1, model="frozen.py:Frozen", checkpoint={"keep": 1, "keep_best": 0}, steps=2, search=asked)
    stores = [file_sizes(outcome.paths.trial(n)) for n in range(8)]
    assert not rows_of(read_rows(outcome.paths.journal)[0], ForgottenRow)
    assert kept_bytes(outcome) < 12e6 < sum(sum(sizes.values()) for sizes in stores)
    assert len(set.intersection(*map(set, stores))) >= 1
