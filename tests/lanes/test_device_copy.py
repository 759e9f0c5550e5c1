"""Copies to a GPU: no GPU is here, so what is asked of torch is recorded."""

from contextlib import contextmanager

import torch

from shoal.data.batch import Batch
from shoal.lanes.device_copy import DeviceCopies


class RecordedTensor(torch.Tensor):
    """Records what a copy asks of it."""

    log: list

    @classmethod
    def of(cls, log):
        made = torch.zeros(2).as_subclass(cls)
        made.log = log
        return made

    def pin_memory(self):
        self.log.append("pinned")
        return RecordedTensor.of(self.log)

    def to(self, device, non_blocking=False):
        self.log.append(f"copied to {device} {'without' if non_blocking else 'with'} waiting")
        return RecordedTensor.of(self.log)

    def record_stream(self, stream):
        self.log.append(f"used on {stream.name}")


class Stream:
    def __init__(self, name, log):
        self.name, self.log = name, log

    def wait_stream(self, other):
        self.log.append(f"{self.name} waits for {other.name}")


class Cuda:
    def __init__(self, log):
        self.log, self.made = log, 0

    def Stream(self, device):
        self.made += 1
        return Stream("copies", self.log)

    def current_stream(self, device):
        return Stream("computation", self.log)

    @contextmanager
    def stream(self, stream):
        self.log.append(f"on {stream.name}")
        yield
        self.log.append(f"off {stream.name}")


def test_a_batch_is_copied_from_page_locked_memory_beside_the_computation():
    log = []
    copies = DeviceCopies(torch.device("cuda:1"), cuda := Cuda(log))
    batch = Batch((RecordedTensor.of(log),), 3, 2)
    moved = copies(batch)
    assert (moved.size, moved.target) == (2, 3)
    assert log == [
        "on copies",
        "pinned",
        "copied to cuda:1 without waiting",
        "off copies",
        "computation waits for copies",
        "used on computation",
    ]
    copies(batch)
    assert cuda.made == 1


def test_a_batch_stays_where_it_is_on_the_cpu_and_moves_to_other_devices():
    batch = Batch((torch.zeros(2),), torch.zeros(2), 2)
    assert DeviceCopies(torch.device("cpu"))(batch) is batch
    assert DeviceCopies(torch.device("meta"))(batch).inputs[0].device.type == "meta"
