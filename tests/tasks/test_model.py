"""What the names of a job become: task, weights, optimizer and schedule."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn

from shoal.errors import ShoalError
from shoal.spec.job import InitFromConfig, LRScheduleConfig
from shoal.spec.load import make_job
from shoal.tasks.initial_weights import rename_prefix
from shoal.tasks.model import (
    build_lr_schedule,
    build_task,
    load_initial_weights,
    match_names,
    set_trainable,
)
from shoal.tasks.task import PlainTask
from tests.conftest import MLP

OWN = {name: value for name, value in MLP.items() if name not in ("model", "loss", "metrics")}
PARAMETERS = ["body.0.weight", "body.0.bias", "body.1.weight", "body.1.bias", "head.weight", "head.bias"]


def net(width=4):
    return nn.ModuleDict(
        {"body": nn.Sequential(nn.Linear(3, width), nn.BatchNorm1d(width)), "head": nn.Linear(width, 2)}
    )


# ---- tasks ----


@pytest.fixture
def task(job_dir):
    return lambda job=MLP, **changes: build_task(make_job(job | changes, base_dir=str(job_dir)))


@pytest.mark.parametrize("name", ["Dcgan", "WordLanguageModel"])
def test_a_task_with_phases_or_a_carry_has_no_teacher(task, name):
    with pytest.raises(ShoalError, match="one loss") as caught:
        task(OWN | {"task": f"loops.py:{name}"}, distil={"teacher": "model"})
    assert caught.value.code == "SH863"


def test_a_job_with_model_and_loss_becomes_a_plain_task(task):
    made = task()
    assert type(made) is PlainTask
    assert [type(layer).__name__ for layer in made.model()] == ["Linear", "ReLU", "Dropout", "Linear"]
    example = (torch.randn(5, 10), torch.zeros(5, dtype=torch.int64))
    assert list(made.metrics(example)) == ["accuracy"]


def test_a_job_with_a_task_of_its_own_gets_it(task):
    assert type(task(OWN, task="models.py:TokenTask")).__name__ == "TokenTask"


@pytest.mark.parametrize(
    ("changes", "where", "words"),
    [
        ({"model": {"name": "models.py:StepRecorder", "args": {"path": "x"}}}, "model", "is not a torch.nn.Module"),
        ({"task": "models.py:UnusedParameter"}, "task", "is not a shoal.Task"),
        ({"model": {"name": "numpy:zeros", "args": {"shape": 2}}}, "model", "returns a ndarray, not a torch.nn.Module"),
    ],
)
def test_a_name_of_the_wrong_kind_is_refused(task, changes, where, words):
    with pytest.raises(ShoalError, match=words) as caught:
        task(OWN if "task" in changes else MLP, **changes)
    assert (caught.value.code, caught.value.where) == ("SH206", where)


class Lit(nn.Module):
    """As a LightningModule."""

    def training_step(self, batch, batch_idx):
        return 0


@pytest.mark.parametrize(
    ("name", "fix"), [(f"{__name__}:Lit", "`training_step` is its `loss"), ("torch.nn:ReLU", "A model goes to `model`")]
)
def test_a_module_that_is_named_as_the_task_is_told_where_it_belongs(task, name, fix):
    with pytest.raises(ShoalError) as caught:
        task(OWN, task=name)
    assert caught.value.code == "SH206"
    assert fix in caught.value.fix


def test_a_loss_may_be_a_class_or_a_function_with_arguments(task):
    output, target = torch.randn(6, 10), torch.arange(6)
    model, batch = nn.Identity(), type("Given", (), {"inputs": (output,), "target": target, "weight": None})
    smooth = {"label_smoothing": 0.5}
    names = ("CrossEntropyLoss", "torch.nn.functional:cross_entropy")
    found = [task(loss={"name": name, "args": smooth}).loss(model, batch) for name in names]
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], nn.functional.cross_entropy(output, target, **smooth))
    assert not torch.equal(found[0], task(loss="torch.nn.functional:cross_entropy").loss(model, batch))


# ---- names ----


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("head", ["head.weight", "head.bias"]),
        ("body.*", PARAMETERS[:4]),
        ("*.bias", PARAMETERS[1::2]),
        ("head.weight", ["head.weight"]),
        ("body.[1].*", PARAMETERS[2:4]),
    ],
)
def test_patterns(pattern, found):
    assert match_names(PARAMETERS, pattern, where="init_from") == found


@pytest.mark.parametrize("pattern", ["hea", "Head", "head.weigh", "bias"])
def test_a_pattern_without_a_match_is_refused(pattern):
    with pytest.raises(ShoalError, match=f"'{pattern}' matches no parameter") as caught:
        match_names(PARAMETERS, pattern, where="init_from")
    assert (caught.value.code, caught.value.where) == ("SH405", "init_from")


def test_a_misspelt_pattern_gets_a_suggestion():
    with pytest.raises(ShoalError) as caught:
        match_names(PARAMETERS, "head.weigth", where="init_from")
    assert "head.weight" in caught.value.fix


@given(st.text(alphabet="ab.", min_size=1), st.text(alphabet="ab.", min_size=1), st.text(alphabet="ab."))
def test_a_prefix_is_replaced_once_and_only_in_front(old, new, rest):
    assert rename_prefix(old + rest, {old: new}) == new + rest
    assert rename_prefix("c" + old, {old: new}) == "c" + old


def test_the_first_prefix_that_fits_counts():
    assert rename_prefix("encoder.x", {"enc": "1", "encoder": "2"}) == "1oder.x"


# ---- initial weights ----


@pytest.fixture
def saved(tmp_path):
    """A file with weights of a net, some of them changed; returns what is loaded and the model after it."""

    def go(changes=None, *, leave=(), width=4, **fields):
        weights = {name: torch.ones_like(value) for name, value in net(width).state_dict().items()}
        weights = {name: value for name, value in weights.items() if name not in leave} | (changes or {})
        save_file(weights, tmp_path / "w.safetensors")
        model = net()
        init = InitFromConfig(path="w.safetensors", **fields)
        return load_initial_weights(model, init, base_dir=str(tmp_path)), model

    return go


def test_weights_that_fit_are_loaded(saved):
    facts, model = saved()
    assert (facts["path"], facts["loaded"], facts["tensors"]) == ("w.safetensors", 9, 9)
    assert [facts[f"{kind}_count"] for kind in ("missing", "left_over", "mismatched")] == [0, 0, 0]
    assert all(bool((value == 1).all()) for value in model.state_dict().values())


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"leave": ["head.bias"]}, r"the file has no 'head.bias' \(1 missing, 0 left over, 0 of another shape\)"),
        ({"changes": {"tail": torch.ones(1)}}, r"the model has no 'tail' \(0 missing, 1 left over, 0 of"),
        ({"changes": {"head.bias": torch.ones(5)}}, r"'head.bias' is \[5\] in the file and \[2\] in the model"),
        ({"width": 5, "leave": ["head.bias", "body.1.num_batches_tracked"], "strict": False}, "none of the file's"),
    ],
)
def test_weights_that_do_not_fit_are_refused(saved, given, words):
    with pytest.raises(ShoalError, match=words) as caught:
        saved(**given)
    assert (caught.value.code, caught.value.where) == ("SH406", "init_from w.safetensors")


def test_without_strict_the_rest_is_reported(saved):
    facts, model = saved({"head.bias": torch.ones(5), "tail": torch.ones(1)}, leave=["head.weight"], strict=False)
    assert (facts["loaded"], facts["tensors"]) == (7, 9)
    assert (facts["missing"], facts["left_over"]) == (["head.weight"], ["tail"])
    assert facts["mismatched"] == ["'head.bias' is [5] in the file and [2] in the model"]
    assert bool((model["body"][0].weight == 1).all())
    assert not bool((model["head"].bias == 1).all())


def test_names_of_the_file_are_renamed_before_they_are_compared(saved):
    there = {"old.weight": torch.ones(2, 4), "old.bias": torch.ones(2)}
    facts, _ = saved(there, leave=["head.weight", "head.bias"], rename={"old.": "head."})
    assert facts["loaded"] == 9


def test_two_names_of_the_file_must_not_become_one(saved):
    with pytest.raises(ShoalError, match=r"'head.bias' and 'old.bias' of the file are both 'head.bias'") as caught:
        saved({"old.bias": torch.ones(2)}, rename={"old.": "head."}, strict=False)
    assert caught.value.fix == "Correct `init_from.rename`."


def test_a_long_list_is_cut_but_counted(saved, monkeypatch):
    monkeypatch.setattr("shoal.tasks.initial_weights.MAX_NAMES", 2)
    facts, _ = saved({f"tail{i}": torch.ones(1) for i in range(5)}, strict=False)
    assert (facts["left_over"], facts["left_over_count"]) == (["tail0", "tail1"], 5)


class TiedModel(torch.nn.Module):
    """As language models are: the output layer has the weights of the embedding."""

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(5, 3)
        self.body = torch.nn.Linear(3, 3)
        self.head = torch.nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight


BODY = {"body.weight": torch.ones(3, 3), "body.bias": torch.ones(3)}


@pytest.mark.parametrize("names", [["embed.weight"], ["head.weight"], ["embed.weight", "head.weight"]])
def test_any_name_of_a_tied_tensor_completes_it(tmp_path, names):
    save_file(BODY | {name: torch.full((5, 3), 2.0) for name in names}, tmp_path / "w.safetensors")
    model = TiedModel()
    facts = load_initial_weights(model, InitFromConfig(path="w.safetensors"), base_dir=str(tmp_path))
    assert (facts["loaded"], facts["tensors"], facts["missing"], facts["left_over"]) == (3, 3, [], [])
    assert model.head.weight is model.embed.weight
    assert bool((model.head.weight == 2).all())


def test_a_tied_tensor_that_is_nowhere_is_missing_once(tmp_path):
    save_file(BODY, tmp_path / "w.safetensors")
    with pytest.raises(ShoalError, match=r"the file has no 'embed.weight' \(1 missing, 0 left over"):
        load_initial_weights(TiedModel(), InitFromConfig(path="w.safetensors"), base_dir=str(tmp_path))


def test_a_file_of_an_untied_model_does_not_fit_a_tied_one(tmp_path):
    """One of the two would be lost: that is said, and the last in the model counts, as it always did."""
    there = {"head.weight": torch.full((5, 3), 7.0), "embed.weight": torch.full((5, 3), 2.0)}
    save_file(BODY | there, tmp_path / "w.safetensors")
    with pytest.raises(ShoalError, match="1 left over"):
        load_initial_weights(TiedModel(), InitFromConfig(path="w.safetensors"), base_dir=str(tmp_path))
    model = TiedModel()
    facts = load_initial_weights(model, InitFromConfig(path="w.safetensors", strict=False), base_dir=str(tmp_path))
    assert (facts["loaded"], facts["left_over"]) == (3, ["embed.weight"])
    assert bool((model.head.weight == 7).all())


def test_what_is_frozen_may_be_unfrozen_again():
    model = net()
    assert load_initial_weights(model, InitFromConfig(freeze=["*"], unfreeze=["head", "*.1.bias"]), base_dir=".") == {}
    assert [name for name, p in model.named_parameters() if p.requires_grad] == PARAMETERS[3:]
    with pytest.raises(ShoalError, match="matches no parameter"):
        set_trainable(model, InitFromConfig(freeze=["neck"]))


# ---- schedules ----


def schedule(**fields):
    spec = LRScheduleConfig.model_validate(fields) if fields else None
    return build_lr_schedule(spec, torch.optim.SGD(net().parameters(), lr=0.1), steps=120, epochs=7, base_dir=".")


def test_words_in_the_arguments_of_a_schedule_are_the_jobs_totals():
    assert schedule() is None
    assert schedule(name="CosineAnnealingLR", args={"T_max": "steps"}).T_max == 120
    assert schedule(name="CosineAnnealingLR", args={"T_max": "epochs"}).T_max == 7
    assert schedule(name="CosineAnnealingLR", args={"T_max": 33}).T_max == 33
    assert schedule(name="OneCycleLR", args={"max_lr": 1, "total_steps": "steps", "anneal_strategy": "linear"})


def test_a_schedule_with_wrong_arguments_is_refused():
    with pytest.raises(ShoalError, match="T_max") as caught:
        schedule(name="CosineAnnealingLR", args={})
    assert caught.value.code == "SH205"
