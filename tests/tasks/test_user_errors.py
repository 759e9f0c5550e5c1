"""What a user reads when the user's own code fails."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from shoal.errors import ShoalError, error
from shoal.net.errors import LinkError, TokenError
from shoal.spec.base import Ref
from shoal.spec.resolve import import_ref
from shoal.tasks.user_errors import as_shoal_error, first_line, wrap_user_errors

BROKEN = """\
import torch


def forward(x):
    return x @ torch.zeros(3, 3)
"""


def raised(act, code="SH401", doing="one step"):
    with pytest.raises(ShoalError) as caught, wrap_user_errors(code, doing):
        act()
    return caught.value


def fail(failure):
    raise failure


@pytest.mark.parametrize(
    ("failure", "line"),
    [
        (ValueError("bad value"), "ValueError: bad value"),
        (ValueError("\n  first\nsecond\n"), "ValueError: first"),
        (ValueError(), "ValueError"),
        (RuntimeError("   "), "RuntimeError"),
        (KeyError("name"), "KeyError: 'name'"),
    ],
)
def test_an_error_is_shown_as_its_kind_and_its_first_line(failure, line):
    assert first_line(failure) == line


@given(st.text())
def test_whatever_an_error_says_it_is_shown_on_one_line(text):
    line = first_line(RuntimeError(text))
    assert len(line.splitlines()) == 1
    assert line.startswith("RuntimeError")
    assert line.removeprefix("RuntimeError").removeprefix(": ") in text


def test_an_error_names_what_was_done_and_the_users_line(tmp_path):
    (tmp_path / "broken.py").write_text(BROKEN)
    forward = import_ref(Ref(name="broken.py:forward"), base_dir=str(tmp_path))
    failure = raised(lambda: forward(torch.zeros(2, 2)), "SH402", "one step, lane 3")
    assert failure.code == "SH402"
    assert failure.message.startswith("one step, lane 3: RuntimeError: ")
    assert failure.where == f"{tmp_path / 'broken.py'}:5"
    assert isinstance(failure.__cause__, RuntimeError)


def test_the_users_line_is_the_innermost_and_not_a_line_of_torch():
    layer = nn.Linear(3, 3)
    failure = raised(lambda: layer(torch.zeros(2, 2)))
    assert failure.where.rpartition(":")[0] == __file__


@pytest.mark.parametrize(
    ("failure", "code"),
    [
        (MemoryError(), "SH407"),
        (RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"), "SH407"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), "SH407"),
        (ValueError("Expected more than 1 value per channel when training"), "SH412"),
        (ValueError("memory"), "SH401"),
    ],
)
def test_some_errors_have_a_code_of_their_own(failure, code):
    assert as_shoal_error(failure, "SH401", "one step").code == code
    assert raised(lambda: fail(failure)).code == code


def test_batch_norm_with_one_sample_is_recognised():
    assert raised(lambda: nn.BatchNorm1d(4)(torch.zeros(1, 4))).code == "SH412"


@pytest.mark.parametrize("failure", [error("SH305", "row 3"), LinkError("gone"), TokenError("other")], ids=repr)
def test_errors_of_shoal_pass_unchanged(failure):
    with pytest.raises(type(failure)) as caught, wrap_user_errors("SH401", "one step"):
        raise failure
    assert caught.value is failure


@pytest.mark.parametrize("failure", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_is_no_error_of_the_user(failure):
    with pytest.raises(failure), wrap_user_errors("SH401", "one step"):
        raise failure


def test_a_block_without_errors_is_left_alone():
    with wrap_user_errors("SH401", "one step"):
        value = 3
    assert value == 3
