"""The parts of a self-check: what differs between objects, what follows from reports, when the next check is due."""

import functools
import os
import random
import sys
import threading
import types

import numpy as np
import pytest
import torch
from torch import nn

from shoal.lanes.lane_sum import LaneSum
from shoal.net.errors import LinkError
from shoal.strategies.self_check.hidden_state import (
    MAX_ITEMS,
    differing_attributes,
    differing_optimizer_attributes,
    saved_objects,
)
from shoal.strategies.self_check.module_data import ModuleData, user_modules
from shoal.strategies.self_check.recompute import fingerprint
from shoal.strategies.self_check.recompute_passes import PassRecorder, PassReplay
from shoal.strategies.self_check.verdict import CheckReport, judge, steps_until_next


class Holder:
    """Attributes as given."""

    def __init__(self, **attributes):
        vars(self).update(attributes)


def generators(seed):
    return {
        "python": random.Random(seed),
        "numpy": np.random.default_rng(seed),
        "legacy": np.random.RandomState(seed),
        "torch": torch.Generator().manual_seed(seed),
    }


@pytest.mark.parametrize(
    ("one", "other", "path"),
    [
        ({"seen": 1}, {"seen": 2}, "task.seen"),
        ({"seen": 1}, {}, "task.seen"),
        ({"seen": 1}, {"seen": 1.0}, "task.seen"),
        ({"log": [1, 2]}, {"log": [1]}, "task.log"),
        ({"log": [1, 2]}, {"log": [1, 3]}, "task.log[1]"),
        ({"counts": {"a": 1}}, {"counts": {"a": 2}}, "task.counts['a']"),
        ({"names": {"a"}}, {"names": {"b"}}, "task.names"),
        ({"mean": torch.zeros(2)}, {"mean": torch.tensor([0.0, -0.0])}, "task.mean"),
        ({"mean": np.zeros(2)}, {"mean": np.ones(2)}, "task.mean"),
        ({"inner": Holder(a=Holder(b=1))}, {"inner": Holder(a=Holder(b=2))}, "task.inner.a.b"),
        *[({name: generators(1)[name]}, {name: generators(2)[name]}, f"task.{name}") for name in generators(0)],
    ],
)
def test_what_differs_has_a_path(one, other, path):
    assert list(differing_attributes(Holder(**one), Holder(**other), name="task")) == [path]


def test_what_is_equal_has_none():
    def made():
        return Holder(a=1, b=[1, {"c": torch.ones(2)}], nan=float("nan"), f=made, kind=Holder, **generators(3))

    assert list(differing_attributes(made(), made(), name="task")) == []


def test_objects_that_refer_to_each_other_come_to_an_end():
    one, other = Holder(a=1), Holder(a=2)
    one.me, other.me = one, other
    assert list(differing_attributes(one, other, name="task")) == ["task.a"]


def test_a_second_optimizer_is_named_and_not_its_tensors():
    def made(steps):
        layer = nn.Linear(2, 1, bias=False)
        nn.init.ones_(layer.weight)
        optimizer = torch.optim.Adam(layer.parameters(), lr=0.0)
        for _ in range(steps):
            layer.weight.grad = torch.ones_like(layer.weight)
            optimizer.step()
        layer.weight.grad = None
        return Holder(optimizer=optimizer)

    assert list(differing_attributes(made(1), made(0), name="task")) == ["task.optimizer"]


def test_what_a_checkpoint_holds_is_left_out():
    def made(value):
        model = nn.Linear(2, 2)
        nn.init.constant_(model.weight, value)
        nn.init.constant_(model.bias, value)
        model.register_buffer("kept", torch.tensor(value))
        model.register_buffer("moving", torch.tensor(value), persistent=False)
        model.register_buffer("lost", torch.tensor(value), persistent=False)
        return model

    one, other = made(1.0), made(2.0)
    seen = saved_objects(one, ["moving"])
    assert list(differing_attributes(one, other, name="model", seen=seen)) == ["model.lost"]


def test_what_an_optimizer_keeps_beside_its_state():
    def made(taken):
        optimizer = torch.optim.SGD([torch.zeros(2)], lr=0.1 * taken)
        optimizer.taken = taken
        return optimizer

    assert list(differing_optimizer_attributes(made(1), made(2), seen={})) == [
        "optimizer.defaults['lr']",
        "optimizer.taken",
    ]


def test_the_data_of_a_module_is_restored_in_place():
    module = types.ModuleType("users")
    module.Net = type("Net", (), {"calls": 0, "__module__": "users"})
    module.log, module.table, module.rng, module.number = [1], {"a": [1]}, np.random.default_rng(0), 5
    referred, expected = module.log, np.random.default_rng(0).random()
    data = ModuleData([module])
    assert data.changed() == []
    module.log.append(2)
    module.table["b"] = 3
    module.rng.random()
    module.number += 1
    module.Net.calls += 1
    assert set(data.changed()) == {"users.log", "users.table", "users.rng", "users.number", "users.Net.calls"}
    data.restore()
    assert data.changed() == []
    assert (referred, module.table, module.number, module.Net.calls) == ([1], {"a": [1]}, 5, 0)
    assert module.rng.random() == expected


def counting_function():
    count = 0

    def tick(seen=[]):  # noqa: B006
        nonlocal count
        count += 1
        seen.append(1)
        return count

    return tick


def users_module(**values):
    module = types.ModuleType("users")
    module.__file__ = "/users/users.py"
    vars(module).update(values)
    return module


def grown_attribute(function):
    function.calls = getattr(function, "calls", 0) + 1
    return function.calls


def grown_local(local):
    local.calls = getattr(local, "calls", 0) + 1
    return local.calls


def grown_variable(monkeypatch):
    monkeypatch.setenv("CALLS", os.environ.get("CALLS", "") + "1")
    return os.environ["CALLS"]


@pytest.mark.parametrize(
    ("value", "use"),
    [
        (counting_function(), lambda tick: tick()),
        (counting_function(), lambda tick: tick() and len(tick.__defaults__[0])),
        (counting_function(), grown_attribute),
        (threading.local(), grown_local),
    ],
    ids=["closure", "default", "attribute of a function", "thread-local"],
)
def test_what_code_keeps_outside_of_objects_is_set_back_to_the_start_and_back(value, use):
    modules = [users_module(value=value)]
    at_start = ModuleData(modules)
    first = use(value)
    use(value)
    now = ModuleData(modules)
    now.restore_earlier(at_start)
    assert use(value) == first
    assert now.changed()
    now.restore()
    assert use(value) == 3


def test_environment_variables_are_set_back_to_the_start_and_back(monkeypatch):
    monkeypatch.delenv("CALLS", raising=False)
    at_start = ModuleData([])
    grown_variable(monkeypatch)
    now = ModuleData([])
    now.restore_earlier(at_start)
    assert "CALLS" not in os.environ
    grown_variable(monkeypatch)
    grown_variable(monkeypatch)
    assert now.changed() == ["os.environ"]
    now.restore()
    assert os.environ["CALLS"] == "1"


def test_a_cache_is_empty_for_the_check_and_full_again_after_it():
    calls = iter(range(10))
    module = users_module(cached=functools.lru_cache(lambda: next(calls)))
    at_start = ModuleData([module])
    assert module.cached() == 0
    now = ModuleData([module])
    now.restore_earlier(at_start)
    assert module.cached() == 1
    now.restore()
    assert module.cached() == 0


def test_what_has_grown_too_large_to_be_set_back_is_not_set_to_the_start():
    module = users_module(log=[])
    at_start = ModuleData([module])
    module.log.extend(range(MAX_ITEMS + 1))
    now = ModuleData([module])
    now.restore_earlier(at_start)
    assert len(module.log) == MAX_ITEMS + 1


class Uncopied(str):
    def __new__(cls):
        return super().__new__(cls, "*")


def test_what_cannot_be_copied_is_left_as_it_is():
    module = users_module(star=Uncopied(), stars=[Uncopied()], number=1)
    data = ModuleData([module])
    module.number = 2
    assert data.changed() == ["users.number"]
    data.restore()
    assert module.number == 1


def test_modules_that_a_module_of_the_user_imports_are_the_users_too(monkeypatch):
    helper = users_module()
    helper.__name__ = "helper"
    module = users_module(helper=helper, torch=torch, Task=type("Task", (), {"__module__": "users"}))
    monkeypatch.setitem(sys.modules, "users", module)
    assert user_modules([module.Task(), torch.nn.Linear(1, 1)]) == [module, helper]


@pytest.mark.parametrize("size", [0, 1, 3, 4, 5, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint8])
def test_a_fingerprint_tells_one_bit(dtype, size):
    tensor = torch.arange(size).to(dtype)
    before = fingerprint(tensor)
    assert fingerprint(tensor.clone()) == before
    for at in {0, size // 2, size - 1} if size else ():
        changed = tensor.clone()
        changed.view(torch.uint8)[at * tensor.element_size()] ^= 1
        assert fingerprint(changed) != before


def test_sums_of_passes_are_kept_as_long_as_there_is_room():
    def total(value):
        return LaneSum([torch.full((20,), value)], [], [], torch.tensor(value), None)

    recorder = PassRecorder(1, replica=Holder(carry=None), room_bytes=2 * 80)
    lent = total(1.0)
    recorder.pass_summed(lent)
    recorder.pass_summed(None)
    lent.grads[0].zero_()  # the replica scales it in place
    recorder.lane_passed(0, None, total(5.0))
    assert [kept and float(kept.grads[0][0]) for kept in recorder.totals] == [1.0, None]
    assert (recorder.lane_sum, recorder.failure) == ("", "")  # lane 0 is not the recorded one
    recorder.pass_summed(total(2.0))
    assert recorder.failure == ""
    recorder.pass_summed(total(3.0))
    assert "free memory" in recorder.failure
    assert recorder.totals == []


def test_a_replay_that_wants_a_further_pass_is_another_step():
    class Twice:
        device = torch.device("cpu")

        def begin_step(self):
            pass

        def take_step(self, step, passes):
            for _ in range(2):
                passes.total(None)

    passes_before = {1: False, 2: True, 3: False}
    for count, is_same in passes_before.items():
        replay = PassReplay(Twice(), 0, share=1.0, totals=[None] * count)
        assert replay.take(0, Twice(), None) is is_same


# ---- verdicts ----


def report(lane, checked, **changes):
    fields = {"lane_sum": f"sum {lane}", "batch": f"batch {lane}", "weights": "w", "checked_lane": checked}
    sums = {"checked_sums": [f"sum {checked}"] * 2, "checked_batch": f"batch {checked}"}
    return CheckReport(lane, **{**fields, **sums, **changes})


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({}, ""),
        ({"checked_batch": "?"}, "lane 0 of step 7 has other samples when worker-3 reads it again"),
        (
            {"checked_sums": ["?", "?"]},
            "lane 0 of step 7, computed again with new objects on worker-3, has other bits than on worker-1",
        ),
        (
            {"checked_sums": ["sum 0", "?"]},
            "lane 0 of step 7 has other bits each time that worker-3 computes it with the same objects",
        ),
        (
            {"update_differs": ["model.weight"]},
            "the update of step 7, made again with new objects on worker-3, differs in model.weight",
        ),
        ({"weights": "?"}, "after step 7 the workers' weights differ"),
    ],
)
def test_what_differs_between_two_workers(changes, why):
    verdict = judge(7, {1: report(0, 2), 3: report(2, 0, **changes)})
    assert (verdict.lanes, verdict.why, verdict.failure) == (2, why, "")


def test_a_worker_that_cannot_check_leaves_the_others_lane_unchecked():
    unable = report(2, 0, checked_sums=[], failure="no memory")
    assert judge(7, {1: report(0, 2), 3: unable}).lanes == 1
    verdict = judge(7, {3: report(2, 2, checked_sums=[], failure="no memory")})
    assert (verdict.lanes, verdict.why, verdict.failure) == (0, "", "no memory")


def test_a_lane_without_samples_is_not_counted():
    empty = report(2, 2, lane_sum="", batch="", checked_sums=[], checked_batch="")
    verdict = judge(7, {3: empty})
    assert (verdict.lanes, verdict.why, verdict.failure) == (0, "", "")


def test_a_report_survives_the_way_to_another_worker():
    sent = report(1, 2, update_differs=["a"], check_s=0.5)
    assert CheckReport.unpack(sent.pack()) == sent


@pytest.mark.parametrize("share", [0.001, 0.01, 1.0])
def test_checks_keep_to_their_share(share):
    """Checks of half a second, steps of 10 ms: at the next check, all checks together are within the share."""
    spent_s = trained_s = 0.0
    for _ in range(20):
        spent_s += 0.5
        now = {0: CheckReport(0, check_s=0.5, all_checks_s=spent_s, trained_s=trained_s, step_s=0.01)}
        trained_s += 0.01 * steps_until_next(now, share=share)
        assert spent_s + 0.5 <= share * trained_s + 0.01 * share + 1e-9


@pytest.mark.parametrize(
    "content",
    [b"", b"[]", b"{}", b"\xff", b'{"lane": "0"}', b"[" * 100_000, CheckReport(0).pack().replace(b"0.0", b"1e999")],
)
def test_a_report_of_another_member_is_checked_before_it_is_used(content):
    with pytest.raises(LinkError):
        CheckReport.unpack(content)


def test_a_report_about_a_lane_that_nobody_trained_is_no_verdict():
    lies = CheckReport(0, lane_sum="a", checked_lane=1 << 40, checked_sums=["a", "a"], weights="w")
    assert judge(3, {0: lies}).lanes == 0


class Odd(str):
    """A text whose class takes no argument, as torch has one."""

    __slots__ = ()

    def __new__(cls):
        return super().__new__(cls, "x")


def test_data_that_cannot_be_copied_is_left_out():
    module = types.ModuleType("users")
    module.odd, module.plain = Odd(), [1]
    data = ModuleData([module])
    module.odd = "y"
    module.plain.append(2)
    assert data.changed() == ["users.plain"]


def test_libraries_of_another_environment_are_not_the_users(tmp_path, monkeypatch):
    library, own = types.ModuleType("a_library"), types.ModuleType("own")
    library.__file__, own.__file__ = str(tmp_path / "site-packages" / "a_library.py"), str(tmp_path / "own.py")
    own.library = library
    monkeypatch.setitem(sys.modules, "a_library", library)
    monkeypatch.setitem(sys.modules, "own", own)
    kind = type("Kind", (), {"__module__": "own"})
    assert [one.__name__ for one in user_modules([kind()])] == ["own"]
