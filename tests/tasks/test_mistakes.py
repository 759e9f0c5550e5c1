"""The commonest mistakes, each as a real job that `shoal check` checks: code, facts, the user's line and the fix."""

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.errors import CATALOGUE, EXIT_TRAIN, ShoalError
from shoal.events import read_events
from shoal.spec.load import make_job
from shoal.spec.run_paths import RunPaths
from shoal.tasks.batch_facts import known_failure
from shoal.tasks.mistakes import BatchFacts, TensorFacts, recognise
from shoal.train.probe_main import check
from tests.conftest import FIXTURES
from tests.train.fake_strategy import RecordingStream

SOURCE = (FIXTURES / "mistakes.py").read_text().splitlines()


def job(model="Net", *, labels="classes", inputs="float", loss="CrossEntropyLoss", metrics=(), **args):
    return {
        "model": {"name": f"mistakes.py:{model}", "args": args},
        "loss": loss,
        "metrics": list(metrics),
        "optimizer": {"name": "SGD", "args": {"lr": 0.1}},
        "data": {
            "source": {
                "kind": "python",
                "factory": {"name": "mistakes.py:Samples", "args": {"labels": labels, "inputs": inputs}},
            },
            "split": "holdout",
        },
        "batch_size": 16,
        "steps": 3,
        "lanes": 2,
    }


ERRORS = {
    "float labels": (job(labels="float"), "SH710", "data.source", "float32 [8] from 0 to 2", "label.long()"),
    "labels of another whole type": (job(labels="int32"), "SH717", "data.source", "int32 [8]", "label.long()"),
    "one-hot labels": (job(labels="one_hot", loss="NLLLoss"), "SH711", "data.source", "[8, 3]", "argmax(-1)"),
    "labels in lists": (
        job(labels="lists"), "SH402", "data.source", r"int64 \[8, 1\] .* a dimension too many", "label.squeeze(-1)",
    ),
    "labels from 1": (job(labels="from_one"), "SH712", "data.source", "from 1 to 3, .* for 0 to 2", "label - 1"),
    "labels 1 and 2": (
        job(labels="one_two", loss="BCEWithLogitsLoss", outputs=1), "SH712", "data.source", "from 1 to 2", "be 0 and 1",
    ),
    "too few outputs": (job(outputs=2), "SH713", "outputs", "from 0 to 2, .* for 0 to 1", "at least 3 outputs"),
    "outputs and one-hot labels": (job(labels="one_hot_4"), "SH713", "outputs", "for 4 classes, not", "4 outputs"),
    "too many outputs": (
        job(labels="number", loss="MSELoss"), "SH713", "outputs", r"output float32 \[8, 3\].* \[8\]", "layer 1 output",
    ),
    "classes as numbers": (job(loss="MSELoss"), "SH714", "loss", "their shapes differ", "CrossEntropyLoss"),
    "classes as yes and no": (job(loss="BCEWithLogitsLoss"), "SH714", "loss", "shapes differ", "CrossEntropyLoss"),
    "numbers as classes": (job(labels="number"), "SH714", "loss", "from 0.1 to 1.5", "MSELoss"),
    "one output": (job(outputs=1), "SH714", "loss", r"\[8, 1\] and a target int64", "BCEWithLogitsLoss"),
    "scores as probabilities": (
        job(labels="binary", loss="BCELoss", outputs=1), "SH714", "loss", "from -", "BCEWithLogitsLoss",
    ),
    "too few columns": (
        job(width=64), "SH715", "inputs", r"expects 64 .* gets 6; .*\[8, 6\]", "in_features=6",
    ),
    "channels": (job("Conv", inputs="image"), "SH715", "conv", "3 channels and gets 1", "in_channels=1"),
    "channels last": (job("Conv", inputs="channels_last"), "SH715", "conv", "and gets 8", "permute(0, 3, 1, 2)"),
    "no image": (job("Conv"), "SH715", "conv", r"dimensions: .*\[8, 6\]", "samples, channels, height, width"),
    "argmax": (job("EndsWithArgmax"), "SH716", "argmax", r"int64 \[8\] is whole numbers", "scores of all classes"),
    "argmax before another": (job("CountsAfterArgmax"), "SH716", "earlier argmax", "carries no gradient", "argmax"),
    "detached": (job("Detached"), "SH716", "detach", "carries no gradient", "detach"),
    "double inputs": (job(inputs="double"), "SH717", "inputs", r"Double and Float.*float64 \[8, 6\]", r"x.float\(\)"),
    "whole inputs": (job(inputs="whole"), "SH717", "inputs", r"Long and Float.*int64 \[8, 6\]", r"x.float\(\)"),
    "float words": (job("Words"), "SH717", "words", r"Embedding .*float32 \[8, 6\]", r"x.long\(\)"),
    "words without rows": (
        job("Words", inputs="tokens"), "SH715", "words", r"no row .*int64 \[8, 6\] from 60 to 65", "vocab_size",
    ),
    "named inputs": (job(inputs="named"), "SH714", "inputs", r"one dict; .*x float32 \[8, 6\]", "`loss: model`"),
    "too few outputs of a model with its loss": (
        job("OwnLoss", inputs="named", loss="model", outputs=2), "SH713", "outputs",
        r"target int64 \[8\] from 0 to 2: .* for 0 to 1", "num_labels",
    ),
    "labels of words": (job(labels="words"), "SH402", "loss", "a target tuple", "names.index(label)"),
    "nothing returned": (job("ReturnsNothing"), "SH402", "loss", "output NoneType", "end with `return`"),
    "a failure that nobody knows": (job("Fails"), "SH401", "fails", "ValueError: never; the batch is float32", "model"),
    "numbers for a metric of classes": (
        job(labels="number", loss="MSELoss", outputs=1, metrics=["accuracy"]), "SH408", "metrics",
        "accuracy compares classes, and the target is float32", "mse",
    ),
    "device": (job("OtherDevice"), "SH718", "device", "meta .* cpu", "device=x.device"),
    "no labels": (job(labels="none"), "SH402", "loss", "a target NoneType", "returns (input, label)"),
    "samples of lists": (job(inputs="lists"), "SH717", "inputs", "a list stands where", "torch.tensor(x)"),
    "an input too few": (
        job("TwoInputs"), "SH715", "two inputs", "TwoInputs.forward() is missing 1 required positional argument: "
        "'other'; the batch is float32 [8, 6]", "one parameter for each input",
    ),
    "an input too many": (
        job("NoInputs"), "SH715", "no inputs", "NoInputs.forward() takes 1 positional argument but 2 were given",
        "(input, target)",
    ),
    "a loss of three": (
        job(loss="mistakes.py:loss_of_three"), "SH402", "loss", "loss_of_three() is missing 1 required",
        "(output, target)",
    ),
}  # fmt: skip


def task_job(function, model="Net", *, task="OwnTask", outputs=3, **args):
    """The mistakes of a loss of one's own, as a LightningModule's training_step has it."""
    made = job(**args)
    own = {} if outputs == 3 else {"outputs": outputs}
    task = {"name": f"mistakes.py:{task}", "args": {"function": function, "model": model, **own}}
    dropped = ("model", "loss", "metrics", *(["optimizer"] if "Steps" in task["name"] else []))
    return {name: value for name, value in made.items() if name not in dropped} | {"task": task}


def of_function(**args):
    return job(**args) | {"loss": "mistakes.py:own_loss"}


def penalised(**args):
    made = task_job("", task="Penalised")
    return made | {"task": made["task"] | {"args": args}}


BATCH = r"the batch is float32 \[8, 6\]"
OF_TASKS = {
    "float labels": (
        task_job("cross_entropy", labels="float"), "SH710", "task loss", r"target float32 \[8\] from 0 to 2", "long()",
    ),
    "labels of another whole type": (
        task_job("cross_entropy", labels="int32"), "SH717", "task loss", r"target int32 \[8\]", "long()",
    ),
    "one-hot labels": (
        task_job("cross_entropy", labels="one_hot"), "SH711", "task loss", r"target int64 \[8, 3\]", "argmax(-1)",
    ),
    "one-hot labels of NLL": (
        task_job("nll_loss", labels="one_hot"), "SH711", "task loss", r"target int64 \[8, 3\]", "argmax(-1)",
    ),
    "labels from 1": (
        task_job("cross_entropy", labels="from_one"), "SH712", "task loss", "from 1 to 3, .* for 0 to 2", "label - 1",
    ),
    "too few outputs": (
        task_job("cross_entropy", outputs=2), "SH713", "outputs", "from 0 to 2, .* for 0 to 1", "at least 3 outputs",
    ),
    "classes in the last dimension": (
        task_job("cross_entropy", "EndsWithTokens", labels="six"), "SH402", "task loss",
        r"output float32 \[8, 6, 3\] and a target int64 \[8, 6\]", "movedim(-1, 1)",
    ),
    "classes as yes and no": (
        task_job("binary_cross_entropy_with_logits"), "SH714", "task loss", r"\[8, 3\] and a target int64 \[8\]",
        "CrossEntropyLoss",
    ),
    "whole numbers as yes and no": (
        task_job("binary_cross_entropy_with_logits", labels="one_hot"), "SH717", "task loss", "labels are of type Long",
        "label.float()",
    ),
    "labels of double precision, seen in backward": (
        task_job("huber_loss", labels="double"), "SH717", "data.source", "type Double, .* of type Float",
        "label.float()",
    ),
    "argmax": (
        task_job("cross_entropy", "EndsWithArgmax"), "SH716", "argmax", r"int64 \[8\] is whole", "without argmax",
    ),
    "too few columns": (
        task_job("cross_entropy", "Wide"), "SH715", "inputs", rf"expects 64 .*gets 6; {BATCH}", "in_features=6",
    ),
    "in a task with phases": (
        task_job("cross_entropy", task="OwnSteps", labels="from_one"), "SH712", "step loss", "from 1 to 3", "label - 1",
    ),
    "a gradient in an evaluation": (
        penalised(always=False), "SH716", "slope", "a gradient is asked of what carries none", "torch.enable_grad()",
    ),
    "in a loss function": (
        of_function(labels="float"), "SH710", "loss function", r"target float32 \[8\] from 0 to 2", "label.long()",
    ),
}  # fmt: skip

NOTES = {
    "softmax": (job("EndsWithSoftmax"), "SH719", "softmax", "CrossEntropyLoss applies softmax itself"),
    "sigmoid": (
        job("EndsWithSigmoid", labels="binary", loss="BCEWithLogitsLoss"), "SH719", "sigmoid", "applies sigmoid itself",
    ),
    "one output of a model with its loss": (
        job("OwnLoss", inputs="named", loss="model", outputs=1), "SH714", "model", "as if they were quantities",
    ),
    "softmax of a task": (task_job("cross_entropy", "EndsWithSoftmax"), "SH719", "softmax", "applies softmax itself"),
    "softmax of a task with phases": (
        task_job("cross_entropy", "EndsWithSoftmax", task="OwnSteps"), "SH719", "softmax", "applies softmax itself",
    ),
    "softmax of a loss function": (
        of_function() | {"model": "mistakes.py:EndsWithSoftmax"}, "SH719", "softmax", "applies softmax itself",
    ),
    "each compared with each": (
        task_job("mse_loss", labels="number", outputs=1), "SH402", "task loss", "[8, 1] and a target float32 [8]",
    ),
    "scores of a task as log-probabilities": (
        task_job("nll_loss"), "SH714", "task loss", "NLLLoss takes log-probabilities",
    ),
    "scores as log-probabilities": (job(loss="NLLLoss"), "SH714", "loss", "NLLLoss takes log-probabilities"),
}  # fmt: skip

RIGHT = {
    "classes": job(metrics=["accuracy"]),
    "one-hot labels as probabilities": job(labels="one_hot"),
    "yes or no": job(labels="binary", loss="BCEWithLogitsLoss", outputs=1, metrics=["accuracy"]),
    "probabilities": job("EndsWithSigmoid", labels="binary", loss="BCELoss"),
    "numbers": job(labels="number", loss="MSELoss", outputs=1),
    "classes of a task": task_job("cross_entropy"),
    "classes of a task with phases": task_job("cross_entropy", task="OwnSteps"),
    "a task with one label for all": task_job("", task="TellsOneNumber"),
    "a loss function": of_function(),
    "a loss with a gradient": penalised(),
    "a model with its loss": job("OwnLoss", inputs="named", loss="model"),
    "a model with its loss of numbers": job("OwnLoss", inputs="named", labels="number", loss="model", outputs=1),
}


@pytest.fixture
def ask(job_dir):
    def go(fields):
        made = make_job(fields, base_dir=str(job_dir))
        return check(made, RunPaths.at(job_dir / "run"), RecordingStream("clerk"))

    return go


def place(where, job_dir):
    """The field of the job, or the line of the fixture with this mark."""
    lines = [n for n, line in enumerate(SOURCE, 1) if line.endswith(f"# mistake {where}")]
    return f"{job_dir / 'mistakes.py'}:{lines[0]}" if lines else where


@pytest.mark.parametrize("name", ERRORS)
def test_a_mistake_is_recognised(name, ask, job_dir):
    fields, code, where, message, fix = ERRORS[name]
    with pytest.raises(ShoalError) as caught:
        ask(fields)
    failure = caught.value
    assert (failure.code, failure.where) == (code, place(where, job_dir)), str(failure)
    assert failure.exit_code == EXIT_TRAIN
    assert found(message, failure.message), failure.message
    assert found(fix, failure.fix), failure.fix


@pytest.mark.parametrize("name", OF_TASKS)
def test_a_mistake_in_a_task_of_ones_own_is_recognised(name, ask, job_dir):
    fields, code, where, message, fix = OF_TASKS[name]
    with pytest.raises(ShoalError) as caught:
        ask(fields)
    failure = caught.value
    assert (failure.code, failure.where) == (code, place(where, job_dir)), str(failure)
    assert found(message, failure.message), failure.message
    assert found(fix, failure.fix), failure.fix


def test_what_a_library_gets_wrong_within_its_forward_is_not_explained():
    library: dict[str, Any] = {}
    exec(compile("def forward():\n    first, second = 1, 2, 3\n", "<library>", "exec"), library)
    with pytest.raises(ValueError, match="too many values") as caught:
        library["forward"]()
    assert known_failure(caught.value.with_traceback(caught.value.__traceback__.tb_next)) is None


@pytest.mark.parametrize(
    ("task", "wrong", "message"),
    [
        ("Phases", "list", "returns no optimizers by name"),
        ("Phases", "returns", "step() does not yield a loss and the name"),
        ("Phases", "yields one", "step() does not yield a loss and the name"),
        ("Single", "pair", "returns a tuple, not one optimizer"),
        ("Single", "class", "returns SGD, not one optimizer"),
        ("Single", "other", "has no parameter of the model"),
    ],
)
def test_optimizers_of_other_tools_are_told(ask, task, wrong, message):
    """What configure_optimizers of Lightning may return, and a training_step."""
    fields = {name: value for name, value in job().items() if name not in ("model", "loss", "metrics", "optimizer")}
    with pytest.raises(ShoalError) as caught:
        ask(fields | {"task": {"name": f"mistakes.py:{task}", "args": {"wrong": wrong}}})
    assert (caught.value.code, caught.value.where) == ("SH861", "task")
    assert message in caught.value.message


def found(pattern, text):
    """Words of the text, or a regular expression."""
    return pattern in text or re.search(pattern, text)


@pytest.mark.parametrize(
    ("low", "high", "classes", "said"),
    [
        (1, 3, 3, "label - 1."),
        (-1, 1, 2, "(label + 1) // 2 for -1 and 1; if -1 marks what has no label, name it: ignore_index."),
        (-1, 2, 3, "if -1 marks what has no label, name it: ignore_index."),
        (3, 5, 3, "its place among all classes. Or give the model 6 outputs."),
    ],
)
def test_labels_are_numbered_by_what_a_batch_can_show(low, high, classes, said):
    """A batch whose classes begin with 3 does not show whether there are classes 1 and 2."""
    output = TensorFacts("float32", (8, classes))
    target = TensorFacts("int64", (8,), low=low, high=high, is_whole=True)
    mistake = recognise(BatchFacts("CrossEntropyLoss", output=output, target=target, classes=classes))
    assert mistake is not None
    assert (mistake.code, mistake.fix.endswith(said)) == ("SH712", True), mistake.fix


@pytest.mark.parametrize("name", NOTES)
def test_what_trains_badly_is_noted(name, ask, job_dir):
    fields, code, where, message = NOTES[name]
    notes = ask(fields)["notes"]
    assert len([n for n in notes if n.startswith(f"{code} {place(where, job_dir)}: ") and message in n]) == 1, notes


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_job_is_left_alone(name, ask):
    assert [note for note in ask(RIGHT[name])["notes"] if note.startswith("SH")] == []


def test_a_run_tells_the_same_before_its_first_step(run):
    outcome = run(job("EndsWithSoftmax"))
    assert outcome.status == "finished"
    notes = [e["message"] for e in read_events(outcome.paths.events) if e.kind == "note"]
    assert [note for note in notes if note.startswith("SH719")]


def test_a_sample_that_makes_the_loss_nan_is_named(run):
    fields = job(inputs="gap")
    outcome = run(fields | {"data": {"source": fields["data"]["source"]}})
    assert outcome.error.code == "SH403"
    assert "sample 17 of the data has a NaN" in outcome.error.message


IDS = TensorFacts("int64", (8, 1, 10), name="input_ids")
SAID = {
    "a batch of one in each sample": ("too many values to unpack (expected 2)", "SH715", "return_tensors"),
    "a long text": ("expanded size of the tensor (8) must match the existing size (4) at", "SH715", "max_length: 4"),
    "channels of a config": (
        "the channel dimension of the pixel values match with the one set in the configuration. Expected 3 but got 1.",
        "SH715", "num_channels",
    ),
    "a backward pass of one's own": ("Trying to backward through the graph a second time", "SH401", "loss.backward()"),
    "a name of a batch": ("'Batch' object has no attribute 'labels'", "SH401", "x, y = batch"),
    "no forward": ('Module [Lit] is missing the required "forward" function', "SH401", "from-other-tools"),
    "cuda": ("Torch not compiled with CUDA enabled", "SH718", "device=x.device"),
}  # fmt: skip


@pytest.mark.parametrize("name", SAID)
def test_what_torch_and_models_say_is_explained(name):
    failure, code, fix = SAID[name]
    inputs = (IDS,) if "batch of one" in name else (TensorFacts("float32", (8, 6)),)
    found = recognise(BatchFacts(failure=failure, inputs=inputs))
    assert found.code == code
    assert fix in found.fix


tensors = st.builds(
    TensorFacts,
    st.sampled_from(["float32", "int64", "bool", "bfloat16", "complex64"]),
    st.lists(st.integers(0, 4), max_size=4).map(tuple),
    st.none() | st.floats(-3, 3),
    st.none() | st.floats(-3, 3),
    st.booleans(),
    st.booleans(),
)


@settings(max_examples=40)
@given(
    st.builds(
        BatchFacts,
        loss=st.sampled_from(["", "CrossEntropyLoss", "NLLLoss", "BCELoss", "BCEWithLogitsLoss", "MSELoss"]),
        output=st.none() | tensors,
        target=st.none() | tensors,
        classes=st.integers(0, 4),
        last_op=st.sampled_from(["", "softmax", "sigmoid", "addmm"]),
        has_gradient=st.booleans(),
        failure=st.text(max_size=30),
    )
)
def test_any_facts_get_a_known_mistake_or_none(facts):
    mistake = recognise(facts)
    assert mistake is None or (mistake.code in CATALOGUE and mistake.fix)
