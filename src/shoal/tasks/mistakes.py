"""Recognises the commonest mistakes in model, loss and data from facts about one batch.

A recogniser is a pure function from facts to a mistake or None. The first one that recognises something answers.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from shoal.errors import plural

CLASS_LOSSES = ("CrossEntropyLoss", "NLLLoss")
PROBABILITY_LOSSES = ("BCELoss", "BCEWithLogitsLoss")
NUMBER_LOSSES = ("MSELoss", "L1Loss", "SmoothL1Loss", "HuberLoss")
_CLASS_FIX = "Write `target_as: class` in a csv or parquet source; a Dataset of your own returns"


@dataclass(frozen=True)
class TensorFacts:
    """A tensor's dtype and shape and, if they were read, the range of its values and whether all are whole numbers.
    `name` is its place in a batch of named entries."""

    dtype: str
    shape: tuple[int, ...]
    low: float | None = None
    high: float | None = None
    is_whole: bool = False
    is_one_hot: bool = False
    name: str = ""

    @property
    def is_float(self) -> bool:
        return "float" in self.dtype

    def __str__(self) -> str:
        return f"{self.name} {self.dtype} {list(self.shape)}".lstrip()

    @property
    def with_range(self) -> str:
        if self.low is None or self.high is None:
            return str(self)
        return f"{self} from {self.low:g} to {self.high:g}"


@dataclass(frozen=True)
class BatchFacts:
    """What is known of a forward pass. `failure` is what torch said, `last_op` the operation that made the output,
    `ignored` the target that the loss ignores, `classes` the number of outputs that count classes. `is_call`: no line
    of the user's failed, but Shoal's call of the model."""

    loss: str = ""
    inputs: tuple[TensorFacts, ...] = ()
    output: TensorFacts | None = None
    target: TensorFacts | None = None
    classes: int = 0
    last_op: str = ""
    has_gradient: bool = True
    failure: str = ""
    is_call: bool = False

    @property
    def in_config(self) -> str:
        """Where a model that is called by name has its number of outputs."""
        return "; in a config of Hugging Face `num_labels`" if any(one.name for one in self.inputs) else ""

    @property
    def call(self) -> str:
        return f"{self.loss} of an output {self.output} and a target {self.target and self.target.with_range}"


@dataclass(frozen=True)
class Mistake:
    """`about` is what the user has to look at. A mistake that is not fatal trains, but not as it should."""

    code: str
    message: str
    fix: str
    about: str = "model"
    fatal: bool = True


Recogniser = Callable[[BatchFacts], Mistake | None]


def recognise(facts: BatchFacts) -> Mistake | None:
    """The mistake that explains these facts, if one of the known ones does."""
    recognisers = RECOGNISERS if facts.failure else [one for one in RECOGNISERS if one not in _OF_FAILURES]
    return next((found for recogniser in recognisers if (found := recogniser(facts))), None)


# ---- what the loss gets ----


def _whole_output(facts: BatchFacts) -> Mistake | None:
    """argmax in forward: classes have no gradient."""
    output = facts.output
    if output is None or (output.is_float and facts.has_gradient) or "complex" in output.dtype:
        return None
    what = "carries no gradient" if output.is_float else "is whole numbers, which have no gradient"
    fix = "Return the scores of all classes, without argmax, round, detach, numpy or no_grad: metrics choose the class."
    return Mistake("SH716", f"the model's output {output} {what}", fix, about="output")


def _float_labels(facts: BatchFacts) -> Mistake | None:
    target, output = facts.target, facts.output
    if facts.loss not in CLASS_LOSSES or target is None or output is None or len(target.shape) >= len(output.shape):
        return None
    if target.is_float and not target.is_whole:
        fix = "To predict numbers use MSELoss and one output for each; for classes give class numbers."
        return Mistake("SH714", f"{facts.call}: the labels are no class numbers", fix, about="loss")
    if target.is_float:
        fix = f"{_CLASS_FIX} an int, or label.long()."
        return Mistake("SH710", f"{facts.call}: class numbers must be int64", fix, about="target")
    if target.dtype not in ("int64", "uint8"):
        message = f"{facts.call}: class numbers must be int64, not {target.dtype}"
        return Mistake("SH717", message, "Convert them: label.long().", about="target")
    return None


def _one_output(facts: BatchFacts) -> Mistake | None:
    """A class loss of one output: torch would take the batch for the scores of one sample."""
    target, output = facts.target, facts.output
    if facts.loss not in CLASS_LOSSES or target is None or output is None or facts.classes != 1:
        return None
    fix = "For two classes give the model 2 outputs, or use BCEWithLogitsLoss; for numbers use MSELoss."
    return Mistake("SH714", f"{facts.call}: with one output there is nothing to choose from", fix, about="loss")


def _one_hot_labels(facts: BatchFacts) -> Mistake | None:
    target, output = facts.target, facts.output
    if facts.loss not in CLASS_LOSSES or target is None or output is None or not target.is_one_hot:
        return None
    if len(target.shape) == len(output.shape) > 1 and target.shape[1] != output.shape[1]:
        message = f"{facts.call}: the labels are one-hot for {target.shape[1]} classes, not for {output.shape[1]}"
        return Mistake("SH713", message, f"Give the last layer {target.shape[1]} outputs.", about="output")
    if facts.failure and len(target.shape) == len(output.shape):
        fix = "Give class numbers: label.argmax(-1); or use CrossEntropyLoss, which takes one-hot labels as floats."
        return Mistake("SH711", f"{facts.call}: the labels are one-hot", fix, about="target")
    return None


def _labels_in_lists(facts: BatchFacts) -> Mistake | None:
    """Each label is a list of one class number."""
    target, output = facts.target, facts.output
    if facts.loss not in CLASS_LOSSES or target is None or output is None or facts.classes < 2 or target.is_float:
        return None
    if not facts.failure or len(target.shape) != len(output.shape) or target.shape[-1] != 1:
        return None
    fix = "Give each sample a number and no list of one: label[0], or label.squeeze(-1)."
    return Mistake("SH402", f"{facts.call}: the labels have a dimension too many", fix, about="target")


def _classes_last(facts: BatchFacts) -> Mistake | None:
    """Classes in the last dimension. A loss that a job names gets them in the second one anyway."""
    target, output = facts.target, facts.output
    if facts.loss not in CLASS_LOSSES or target is None or output is None or not facts.failure:
        return None
    if len(output.shape) < 3 or output.shape[:-1] != target.shape:
        return None
    message = f"{facts.call}: the classes are in the last dimension of the output, and belong into the second"
    return Mistake("SH402", message, "Move them: output.movedim(-1, 1); or flatten both.", about="loss")


def _labels_from_one(facts: BatchFacts) -> Mistake | None:
    target, classes = facts.target, facts.classes
    if facts.loss not in CLASS_LOSSES or target is None or target.is_float or not _has_range(target) or classes < 2:
        return None
    low, high = target.low or 0, target.high or 0
    if low >= 0 and high < classes:
        return None
    told = f"labels go from {low:g} to {high:g}, and the model has outputs for 0 to {classes - 1}"
    if low < 0 or (low >= 1 and high - low < classes):
        fix = f"Number the classes from 0. {_CLASS_FIX} {_numbered_from_zero(low, high)}."
        return Mistake("SH712", f"{facts.call}: {told}", fix, about="target")
    fix = f"Give the last layer at least {high + 1:g} outputs, one for each class{facts.in_config}."
    return Mistake("SH713", f"{facts.call}: {told}", fix, about="output")


def _numbered_from_zero(low: float, high: float) -> str:
    """What a label becomes. One batch does not show which classes there are, unless they begin with 1."""
    if low < 0:
        two = "(label + 1) // 2 for -1 and 1; " if (low, high) == (-1, 1) else ""
        return f"{two or 'its place among all classes; '}if {low:g} marks what has no label, name it: ignore_index"
    return "label - 1" if low == 1 else f"its place among all classes. Or give the model {high + 1:g} outputs"


def _labels_outside_probabilities(facts: BatchFacts) -> Mistake | None:
    target, output = facts.target, facts.output
    if facts.loss not in PROBABILITY_LOSSES or target is None or output is None or target.shape != output.shape:
        return None
    if not _has_range(target) or ((target.low or 0) >= 0 and (target.high or 0) <= 1):
        return None
    fix = "Let the two classes be 0 and 1; for more classes use CrossEntropyLoss, for numbers MSELoss."
    return Mistake("SH712", f"{facts.call}: labels must be in 0..1", fix, about="target")


def _wrong_loss(facts: BatchFacts) -> Mistake | None:
    """A loss that compares number by number gets class numbers for several outputs, or another number of them."""
    target, output = facts.target, facts.output
    if facts.loss not in (*NUMBER_LOSSES, *PROBABILITY_LOSSES) or target is None or output is None:
        return None
    if target.shape == output.shape:
        return None
    message = f"{facts.call}: their shapes differ"
    each, outputs = _numbers_per_sample(target), _numbers_per_sample(output)
    if each == outputs:
        fix = "Give both the same shape: output.view_as(target)."
        return Mistake("SH402", message, fix, about="loss")
    if each == 1 and (target.is_whole or not target.is_float):
        as_int = " and labels as int64: label.long()" if target.is_float else ""
        fix = f"For class numbers use CrossEntropyLoss{as_int}; for numbers give the last layer one output."
        return Mistake("SH714", message, fix, about="loss")
    fix = f"Give the last layer {plural(each, 'output')} for each sample, in the same shape; or use another loss."
    return Mistake("SH713", message, fix, about="output")


def _other_label_type(facts: BatchFacts) -> Mistake | None:
    """What torch says in the loss, or in its backward pass, where its arguments are not known."""
    found = re.search(
        r"Found dtype (?P<given>\w+) but expected (?P<wanted>\w+)|"
        r"result type (?P<result>\w+) can't be cast to the desired output type (?P<label>\w+)",
        facts.failure,
    )
    if not found:
        return None
    given, wanted = found["given"] or found["label"], found["wanted"] or found["result"]
    call = f"{facts.call}: " if facts.loss else ""
    message = f"{call}the labels are of type {given}, and the outputs of type {wanted}"
    return Mistake("SH717", message, f"Convert the labels: label.{wanted.lower()}().", about="target")


def _scores_for_probabilities(facts: BatchFacts) -> Mistake | None:
    output = facts.output
    if output is None or not _has_range(output):
        return None
    low, high = output.low or 0, output.high or 0
    told = f"the model's output is {output.with_range}"
    if facts.loss == "BCELoss" and (low < 0 or high > 1):
        fix = "Use BCEWithLogitsLoss, which takes scores; or end the model with a sigmoid."
        return Mistake("SH714", f"BCELoss takes probabilities, and {told}", fix, about="loss")
    if facts.loss == "NLLLoss" and high > 0 and not facts.failure:
        fix = "Use CrossEntropyLoss, which takes scores; or end the model with log_softmax."
        return Mistake("SH714", f"NLLLoss takes log-probabilities, and {told}", fix, about="loss", fatal=False)
    return None


def _softmax_twice(facts: BatchFacts) -> Mistake | None:
    """The loss applies softmax or sigmoid itself: a second one flattens the gradient, and training stalls."""
    doubled = {"CrossEntropyLoss": "softmax", "BCEWithLogitsLoss": "sigmoid"}.get(facts.loss, "")
    if not doubled or facts.last_op != doubled or facts.failure:
        return None
    message = f"the model ends with {doubled}, and {facts.loss} applies {doubled} itself: it trains badly"
    return Mistake("SH719", message, f"Return the scores without {doubled}.", about="output", fatal=False)


# ---- what the model gets ----


def _wrong_input_shape(facts: BatchFacts) -> Mistake | None:
    for pattern, tell in _SHAPE_FAILURES:
        if found := re.search(pattern, facts.failure):
            message, fix = tell(found)
            return Mistake("SH715", f"{message}{_given(facts)}", fix, about="failure")
    return None


def _product(found: re.Match[str]) -> tuple[str, str]:
    _, given, expected, _ = (int(number) for number in found.groups())
    fix = f"Give the layer in_features={given}, or the data {expected} columns; images need nn.Flatten() before it."
    return f"a layer expects {expected} features and gets {given}", fix


def _channels(found: re.Match[str]) -> tuple[str, str]:
    shape, expected, given = found.groups()
    sizes = [int(size) for size in shape.split(", ")]
    if sizes[-1] == int(expected) and len(sizes) == 4:
        fix = "The channels are last: move them with x.permute(0, 3, 1, 2) in data.transform or forward."
    else:
        fix = f"Give the layer in_channels={given}, or the data {expected} channels, as [samples, channels, …]."
    return f"a convolution expects {expected} channels and gets {given}, in [{shape}]", fix


def _dimensions(found: re.Match[str]) -> tuple[str, str]:
    fix = "Give images as [samples, channels, height, width] and series as [samples, channels, time]: data.transform."
    return f"a layer gets the wrong number of dimensions: {found.group(0)}", fix


def _long_text(found: re.Match[str]) -> tuple[str, str]:
    given, most = found.groups()
    fix = "Change the sizes of the layer, or the shape of the data; a text that is too long for a model of Hugging Face"
    return (
        f"a tensor of {given} is to fit one of {most}",
        f"{fix} is cut by `max_length: {most}` in data.source, or `truncation` of the tokenizer.",
    )


def _channels_of_config(found: re.Match[str]) -> tuple[str, str]:
    fix = f"Give images as [samples, {found[1]}, height, width], or write `num_channels` in the config of the model."
    return f"the model expects {found[1]} channels and gets {found[2]}", fix


def _other_shape(found: re.Match[str]) -> tuple[str, str]:
    return (
        f"shapes do not fit: {found.group(0)}",
        "Change the sizes of the layer at this line, or the shape of the data.",
    )


_SHAPE_FAILURES: tuple[tuple[str, Callable[[re.Match[str]], tuple[str, str]]], ...] = (
    (r"mat1 and mat2 shapes cannot be multiplied \((\d+)x(\d+) and (\d+)x(\d+)\)", _product),
    (r"expected input\[([\d, ]+)\] to have (\d+) channels, but got (\d+) channels", _channels),
    (r"channel dimension of the pixel values .* Expected (\d+) but got (\d+)", _channels_of_config),
    (r"expanded size of the tensor \((\d+)\) must match the existing size \((\d+)\)", _long_text),
    (r"Input image size \(.*\) doesn't match model", _other_shape),
    (r"Expected \dD .* input to conv\w+, but got input of size: \[[\d, ]*\]", _dimensions),
    (r"expected \dD(?: or \dD)? input \(got \dD input\)", _dimensions),
    (r"input\.size\(-1\) must be equal to input_size\. Expected \d+, got \d+", _other_shape),
    (r"Given normalized_shape=.*", _other_shape),
    (r"running_mean should contain \d+ elements not \d+", _other_shape),
    (r"shape '\[[-\d, ]*\]' is invalid for input of size \d+", _other_shape),
    (r"Kernel size can't be greater than actual input size", _other_shape),
    (r"The size of tensor a \(\d+\) must match the size of tensor b \(\d+\).*", _other_shape),
    (r"Sizes of tensors must match except in dimension.*", _other_shape),
    (r"was expecting embedding dimension of \d+, but got \d+", _other_shape),
)


def _one_dimension_more(facts: BatchFacts) -> Mistake | None:
    """Samples of a tokenizer that was asked for tensors: each is a batch of one."""
    found = [
        one
        for one in facts.inputs
        if one.name and "int" in one.dtype and one.shape[1:2] == (1,) and len(one.shape) == 3
    ]
    if not facts.failure or not found:
        return None
    fix = 'Leave out return_tensors="pt" where a sample is made, or take its only row: value[0], or squeeze(0).'
    return Mistake("SH715", f"each sample is a batch of one{_given(facts)}", fix, about="failure")


def _no_such_row(facts: BatchFacts) -> Mistake | None:
    if "index out of range in self" not in facts.failure:
        return None
    fix = (
        "Give the embedding more rows than the largest number in the data: num_embeddings; in a config of Hugging Face "
        "`vocab_size`, at least len(tokenizer), and `max_position_embeddings`, at least the longest text."
    )
    return Mistake("SH715", f"nn.Embedding has no row for a number that it gets{_given(facts)}", fix, about="failure")


def _gradient_of_nothing(facts: BatchFacts) -> Mistake | None:
    """A loss that computes a gradient itself, such as a penalty of it, in an evaluation."""
    if not re.search(r"does not require grad and does not have a grad_fn|differentiated Tensors", facts.failure):
        return None
    fix = (
        "Evaluations compute no gradients: put what needs them into `with torch.enable_grad():`, or give the Task an "
        "`evaluate`. In training, leave out detach, item, numpy and no_grad before it."
    )
    return Mistake("SH716", "a gradient is asked of what carries none", fix, about="failure")


def _of_another_loop(facts: BatchFacts) -> Mistake | None:
    """What belongs into a loop of the user's own, or into another tool."""
    for pattern, code, message, fix in _OTHER_LOOPS:
        if re.search(pattern, facts.failure):
            return Mistake(code, f"{message}{_given(facts)}", fix, about="failure")
    return None


_OTHER_LOOPS = (
    ("Trying to backward through the graph a second time", "SH401", "the loss has computed its gradient already",
     "Leave out loss.backward() and optimizer.step(): Shoal calls them. Or detach what an earlier step has made."),
    ("'Batch' object has no attribute", "SH401", "a batch has `inputs`, a tuple, `target`, `size` and `weight`",
     "Write batch.inputs[0] and batch.target, or `x, y = batch`."),
    ('missing the required "forward" function', "SH401", "a module is called that has no `forward`",
     "Give it one; a LightningModule with a training_step becomes a Task: docs/from-other-tools.md."),
    ("Torch not compiled with CUDA|Found no NVIDIA driver|No CUDA GPUs are available", "SH718", "there is no GPU here",
     "Leave out .cuda() and .to('cuda'): Shoal moves model and batch; make other tensors with device=x.device."),
)  # fmt: skip


def _named_entries(facts: BatchFacts) -> Mistake | None:
    """A batch of named entries for a model that is not called by name."""
    if not re.search(r"'dict' object has no attribute|must be Tensor, not dict|Tensor .*but got .*dict", facts.failure):
        return None
    fix = (
        "A model of Hugging Face is called by name and computes its loss itself: `loss: model`. A model of your own "
        "takes the entries out of the dict in forward."
    )
    message = f"the model gets the whole batch as one dict{_given(facts)}"
    return Mistake("SH714", message, fix, about="failure")


def _lists(facts: BatchFacts) -> Mistake | None:
    """Samples of lists: torch's collate makes a list of tensors of them, one for each place."""
    if not re.search(
        r"must be Tensor, not (?:list|tuple)|'(?:list|tuple)' object has no attribute '(?:view|reshape|float|long|shape"
        r"|size|dim|flatten|squeeze|unsqueeze|permute|to|device|dtype|mean)'",
        facts.failure,
    ):
        return None
    fix = "Let the dataset return tensors or arrays, not lists: torch.tensor(x); in forward join tensors by stack."
    return Mistake("SH717", f"a list stands where a tensor belongs{_given(facts)}", fix, about="failure")


def _wrong_number_of_inputs(facts: BatchFacts) -> Mistake | None:
    found = re.search(r"(\S+\(\)) (?:(missing .*)|(takes .*))", facts.failure)
    if not found or not facts.is_call:
        return None
    name, missing, taken = found.groups()
    message = f"{name} is {missing}{_given(facts)}" if missing else f"{name} {taken}{_given(facts)}"
    if not name.endswith(".forward()"):
        return Mistake("SH402", message, "A loss takes (output, target), that of a Task (model, batch).", about="loss")
    message = message if missing else f"{name} {taken}, `self` among them{_given(facts)}"
    fix = (
        "Give forward one parameter for each input: all entries of a sample but the last, which is the target. A "
        "Dataset for a model of one input returns (input, target)."
    )
    return Mistake("SH715", message, fix, about="forward")


def _no_phases(facts: BatchFacts) -> Mistake | None:
    """A `step` that returns its loss, or yields it without a name."""
    said = r"object is not an iterator|iteration over a 0-d tensor|(?:too many|not enough) values to unpack"
    if not facts.is_call or not re.search(said, facts.failure):
        return None
    fix = 'Write `yield loss, "name"` for each update; with one optimizer, write `loss` instead of `step`.'
    return Mistake("SH861", "step() does not yield a loss and the name of its optimizer", fix, about="task")


def _wrong_input_dtype(facts: BatchFacts) -> Mistake | None:
    if "argument #1 'indices' to have one of the following scalar types" in facts.failure:
        fix = "Give whole numbers: x.long() in forward, or int64 in the data."
        return Mistake("SH717", f"nn.Embedding takes whole numbers{_given(facts)}", fix, about="failure")
    found = re.search(r"same dtype, but got (\w+) and (\w+)", facts.failure) or re.search(
        r"(?:Input type|expected scalar type) \(?([\w ]+?)\)? (?:and|but found) (?:\w+ type \()?(\w+)", facts.failure
    )
    if not found:
        return None
    fix = "Convert the input: x.float() in forward or data.transform; a model in float64 needs x.double()."
    message = f"the dtypes of input and layer differ ({found.group(1)} and {found.group(2)}){_given(facts)}"
    return Mistake("SH717", message, fix, about="failure")


def _wrong_device(facts: BatchFacts) -> Mistake | None:
    found = re.search(
        r"Expected all tensors to be on the same device.*|Tensor on device \S+ is not on the expected device \S+|"
        r"Input type \([\w.]+\) and weight type \([\w.]+\) should be the same.*cuda.*",
        facts.failure,
    )
    if not found:
        return None
    fix = "Make tensors in forward with device=x.device, or register them as buffers; Shoal moves model and batch."
    return Mistake("SH718", f"tensors are on different devices: {found.group(0).rstrip('!')}", fix, about="failure")


def _given(facts: BatchFacts) -> str:
    if not facts.inputs:
        return ""
    return f"; the batch is {', '.join(one.with_range for one in facts.inputs)}"


def _has_range(tensor: TensorFacts) -> bool:
    return tensor.low is not None and tensor.high is not None


def _numbers_per_sample(tensor: TensorFacts) -> int:
    count = 1
    for size in tensor.shape[1:]:
        count *= size
    return count


RECOGNISERS: tuple[Recogniser, ...] = (
    _wrong_device,
    _wrong_input_dtype,
    _whole_output,
    _one_output,
    _one_hot_labels,
    _float_labels,
    _labels_in_lists,
    _classes_last,
    _labels_from_one,
    _labels_outside_probabilities,
    _wrong_loss,
    _other_label_type,
    _scores_for_probabilities,
    _softmax_twice,
    _one_dimension_more,
    _wrong_input_shape,
    _no_such_row,
    _gradient_of_nothing,
    _of_another_loop,
    _named_entries,
    _lists,
    _wrong_number_of_inputs,
    _no_phases,
)
_OF_FAILURES = (
    _wrong_device, _wrong_input_dtype, _classes_last, _other_label_type, _one_dimension_more, _wrong_input_shape,
    _no_such_row, _gradient_of_nothing, _of_another_loop, _named_entries, _lists, _wrong_number_of_inputs,
    _no_phases,
)  # fmt: skip
"""They read what torch said. Without a failure, no worker compiles their patterns."""
