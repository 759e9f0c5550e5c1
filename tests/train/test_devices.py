"""Where a worker trains. There need be no GPU for it: places are taken by processes, however these end."""

import subprocess
import sys

import pytest
import torch

from shoal.errors import TrainError
from shoal.train.devices import claim_device, claim_slot, pick_device

TAKE = """
import sys
from pathlib import Path
from shoal.train.devices import claim_slot
print(claim_slot(Path(sys.argv[1]), int(sys.argv[2])), flush=True)
sys.stdin.read()
"""


class DeviceHolder:
    def __init__(self, directory, places):
        command = [sys.executable, "-c", TAKE, str(directory), str(places)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    @property
    def slot(self):
        return int(self.process.stdout.readline())

    def die(self):
        self.process.kill()
        self.process.communicate()


def test_places_are_taken_evenly_and_are_free_when_somebody_dies(tmp_path):
    takers = []
    try:
        for expected in (0, 1, 0):
            takers.append(DeviceHolder(tmp_path / "gpus", 2))
            assert takers[-1].slot == expected
        takers[1].die()
        assert claim_slot(tmp_path / "gpus", 2) == 1
    finally:
        for taker in takers:
            taker.die()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu():
    assert claim_device("auto") == pick_device("auto") == torch.device("cpu")
    with pytest.raises(TrainError, match=r"SH411 device: there is no device 'cuda:1' here"):
        claim_device("cuda:1")
