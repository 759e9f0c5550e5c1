"""What a contributor carries from step to step."""

import pytest
import torch

from shoal.codecs.residual import Residual


def test_nothing_is_there_before_the_first_step():
    memory = Residual(4)
    assert memory.state() == {}
    before, after = memory.before_and_after()
    assert before is None
    assert not after.any()
    assert memory.state() == {}


def test_only_committed_residuals_count():
    memory = Residual(4)
    memory.before_and_after()[1].fill_(1.0)
    memory.commit()
    before, after = memory.before_and_after()
    after.fill_(2.0)
    assert before.tolist() == memory.state()["memory"].tolist() == [1.0] * 4
    memory.commit()
    assert memory.state()["memory"].tolist() == [2.0] * 4


def test_slices_for_several_buffers():
    memory = Residual(5)
    memory.before_and_after(0, 2)[1].fill_(1.0)
    memory.before_and_after(2, 5)[1].fill_(2.0)
    memory.commit()
    assert memory.before_and_after(1, 3)[0].tolist() == [1.0, 2.0]


def test_a_state_is_copied_and_none_means_from_the_beginning():
    memory, saved = Residual(3), torch.ones(3)
    memory.load_state({"memory": saved})
    saved.zero_()
    assert memory.before_and_after()[0].tolist() == [1.0] * 3
    memory.load_state({})
    assert memory.state() == {}


def test_what_does_not_fit_is_refused():
    for found in (torch.zeros(4), torch.zeros(3, dtype=torch.float64), torch.zeros(3, 1)):
        with pytest.raises(ValueError, match="the codec needs 3"):
            Residual(3).load_state({"memory": found})
    with pytest.raises(ValueError, match="nothing was encoded"):
        Residual(3).commit()
