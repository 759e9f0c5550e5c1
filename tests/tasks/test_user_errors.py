"""What a user reads when the user's own code fails."""

import signal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from shoal.errors import MAX_MESSAGE, ShoalError, describe_exception, error, traceback_text
from shoal.net.errors import LinkError, TokenError
from shoal.spec.base import Ref
from shoal.spec.resolve import import_ref
from shoal.tasks.user_errors import as_shoal_error, wrap_user_errors

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
    assert describe_exception(failure) == line


@given(st.text())
def test_whatever_an_error_says_it_is_shown_on_one_line(text):
    line = describe_exception(RuntimeError(text))
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


def test_ctrl_c_is_no_error_of_the_user():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt), wrap_user_errors("SH401", "one step"):
            raise KeyboardInterrupt
    finally:
        signal.signal(signal.SIGINT, before)


class Unheard(BaseException):
    pass


@pytest.mark.parametrize("failure", [SystemExit(3), Unheard("mine")], ids=repr)
def test_the_users_code_cannot_end_the_process(failure):
    told = raised(lambda: fail(failure))
    assert told.code == "SH428"
    assert told.where.rpartition(":")[0] == __file__


def test_an_interrupt_is_the_users_where_its_signal_is_ignored(monkeypatch):
    """As in a worker."""
    old = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        assert raised(lambda: fail(KeyboardInterrupt())).code == "SH428"
    finally:
        signal.signal(signal.SIGINT, old)


class Unprintable(Exception):
    def __str__(self):
        raise self

    __repr__ = __str__


class Silent(Exception):
    def __str__(self):
        raise SystemExit(0)


@pytest.mark.parametrize("failure", [Unprintable(), Silent()], ids=["raises", "exits"])
def test_an_error_that_cannot_be_printed_is_told_with_its_kind(failure):
    told = raised(lambda: fail(failure))
    assert type(failure).__name__ in told.message
    assert told.where.rpartition(":")[0] == __file__
    assert type(failure).__name__ in traceback_text(told.__cause__)


def test_a_huge_message_is_shortened():
    told = raised(lambda: fail(ValueError("x" * 100_000_000)))
    assert len(told.message) < MAX_MESSAGE + 100
    assert len(traceback_text(told.__cause__)) < 30_000


def test_a_block_without_errors_is_left_alone():
    with wrap_user_errors("SH401", "one step"):
        value = 3
    assert value == 3
