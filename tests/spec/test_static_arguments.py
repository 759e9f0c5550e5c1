"""Arguments are compared with source code, all of a job at once, with their lines."""

import pytest

from shoal.errors import ErrorGroup
from shoal.spec.load import load_job
from shoal.spec.signatures.static import read_parameters

CODE = """
import functools
from dataclasses import dataclass
from torch import nn

class Net(nn.Module):
    def __init__(self, hidden, *, depth=2): ...
class Same(Net): ...
class Free(nn.Module): ...
@dataclass
class Data:
    x: int
def build(width, scale=1.0): ...
def anything(**options): ...
@functools.cache
def cached(width): ...
"""


@pytest.mark.parametrize(
    ("name", "names", "required"),
    [
        ("Net", ("hidden", "depth"), ("hidden",)),
        ("Same", ("hidden", "depth"), ("hidden",)),
        ("build", ("width", "scale"), ("width",)),
    ],
)
def test_what_source_code_tells(tmp_path, name, names, required):
    (tmp_path / "code.py").write_text(CODE)
    found = read_parameters(str(tmp_path / "code.py"), name)
    assert (found.names, found.required) == (names, required)


@pytest.mark.parametrize("name", ["Free", "Data", "anything", "cached", "nothing"])
def test_what_it_does_not_tell(tmp_path, name):
    (tmp_path / "code.py").write_text(CODE)
    assert read_parameters(str(tmp_path / "code.py"), name) is None


JOB = """name: bad
model: {name: "code.py:Net", args: {hiden: 2}}
loss: {name: CrossEntropyLoss, args: {smoothing: 0.1}}
optimizer:
  name: AdamW
  args:
    lr: 0.1
    decay: 0.1
schedule: {name: StepLR, args: {step: 3}}
data:
  source: {kind: sklearn, name: iris}
  augment: {name: RandomCrop, args: {sizes: 3}}
epochs: 2
"""


def test_all_arguments_of_a_job_are_told_at_once_with_their_lines(tmp_path):
    (tmp_path / "code.py").write_text(CODE)
    (tmp_path / "job.yaml").write_text(JOB)
    with pytest.raises(ErrorGroup) as caught:
        load_job(tmp_path / "job.yaml")
    told = {
        (problem.where.split("job.yaml:")[1], problem.message.split(" takes ")[-1]) for problem in caught.value.errors
    }
    wanted = {
        ("2 model.args.hiden", "no argument 'hiden'"),
        ("2 model.name", "code.py:Net needs the argument 'hidden'"),
        ("3 loss.args.smoothing", "no argument 'smoothing'"),
        ("8 optimizer.args.decay", "no argument 'decay'"),
        ("9 schedule.args.step", "no argument 'step'"),
        ("12 data.augment.args.sizes", "no argument 'sizes'"),
    }
    assert wanted <= told
    assert {problem.code for problem in caught.value.errors} == {"SH205"}


def test_right_arguments_are_no_problem(tmp_path):
    (tmp_path / "code.py").write_text(CODE)
    right = JOB.replace("hiden", "hidden").replace("smoothing", "label_smoothing").replace("decay", "weight_decay")
    right = right.replace("step: 3", "step_size: 3").replace("sizes", "size")
    (tmp_path / "job.yaml").write_text(right)
    assert load_job(tmp_path / "job.yaml").name == "bad"
