"""The error tree. Every error that a user can cause has a code, a place and a fix.

An error is data: a worker sends it to the driver as an event (`to_fields`, `error_from_fields`), and it is printed
without a traceback. `CATALOGUE` is the only list of codes; `python -m shoal.errors` makes docs/errors.md from it and a
test compares the two.
"""

from __future__ import annotations

import difflib
import errno
import os
import resource
import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

EXIT_OK = 0
EXIT_BUG = 1
EXIT_JOB = 2
EXIT_DATA = 3
EXIT_TRAIN = 4
EXIT_CHECKPOINT = 5
EXIT_RUN = 6
EXIT_INTERRUPTED = 130
EXIT_TERMINATED = 143
MAX_SUGGESTED_FILES = 10
MAX_MESSAGE = 2_000
MAX_TRACEBACK = 20_000
"""Characters of an exception's message and traceback that are kept."""
MAX_CHAIN = 10
"""How many exceptions that led to one another a traceback shows."""


@dataclass(frozen=True)
class Entry:
    """Title of a code, and the fix that is shown if the error has none of its own."""

    title: str
    fix: str


CATALOGUE: dict[str, Entry] = {
    # 1xx: the job file
    "SH101": Entry("the job file cannot be read", "Give the path of a readable YAML file."),
    "SH102": Entry("the file is not valid YAML", "Fix the YAML at the line shown; indent with spaces."),
    "SH103": Entry("unknown field", "Use one of the allowed fields."),
    "SH104": Entry("a required field is missing", "Add the field."),
    "SH105": Entry("wrong type", "Write a value of the type shown."),
    "SH106": Entry("value out of range or not among the choices", "Use an allowed value."),
    "SH107": Entry("two fields contradict each other", "Keep one of the two."),
    "SH108": Entry("a field is given twice", "Remove one of the two lines."),
    "SH109": Entry("a bad --set override", "Write --set path.to.field=value."),
    "SH110": Entry("not supported together", "Change one of the two settings."),
    "SH111": Entry("a field has another name now", "Write the name shown."),
    # 2xx: names that the job refers to
    "SH201": Entry("the module or file of a name is not found", "Check the spelling, or install the package."),
    "SH202": Entry("the module has no such name", "Use a name that the module defines."),
    "SH203": Entry("a name is not written as module:name or file.py:name", "Write module:name or file.py:name."),
    "SH204": Entry("importing the name failed", "Fix the error in the imported code."),
    "SH205": Entry("the arguments do not fit", "Change `args` to what the function or class takes."),
    "SH206": Entry("the name is not of the right kind", "Refer to an object of the kind shown."),
    "SH207": Entry("an optional package is not installed", "Install the extra shown."),
    "SH208": Entry("calling the name failed", "Fix the error in the called code, or change `args`."),
    "SH209": Entry("a remote job names code that this machine does not trust",
                   "Allow the module with shoal join --allow, or all of the job's code with --trust-code."),
    "SH210": Entry("the name is part of Python's standard library", "Name your own code, or a package's."),
    # 3xx: data
    "SH301": Entry("a data file is not found", "Check the path; relative paths start at the job file's directory."),
    "SH302": Entry("a data file is empty", "Give a file with at least one sample."),
    "SH303": Entry("a column or array is missing", "Use a name that the data has."),
    "SH304": Entry("a bad row", "Fix the row, or set data.on_bad_row: skip."),
    "SH305": Entry("a value that is not a number (NaN) or is infinite", "Fix the data, or set data.on_bad_row: skip."),
    "SH306": Entry("wrong shape or length", "Make the arrays agree."),
    "SH307": Entry("the data file cannot be parsed", "Check that the file has the format of `source.kind`."),
    "SH308": Entry("the data cannot be reached", "Check the URL, the credentials and the network."),
    "SH309": Entry("the dataset failed to return a sample", "Fix the dataset's code."),
    "SH310": Entry("wrong value type in the data", "Convert the column, or leave it out of the inputs."),
    "SH311": Entry("augment or transform failed", "Fix the function; the message is its own."),
    "SH312": Entry("loader processes die of the same samples",
                   "Set data.loader.workers: 0 to see the error itself, or free memory."),
    "SH313": Entry("the data cache cannot be used", "Free some disk space, or give another cache directory."),
    # 35x: splits and samplers
    "SH351": Entry("too few samples for the split", "Use fewer folds or more data."),
    "SH352": Entry("the split needs a column", "Name the column in the split."),
    "SH353": Entry("a leak: the same data is on both sides of the split", "Change the split, or remove duplicates."),
    "SH354": Entry("the split is not possible with this data", "Choose another split."),
    "SH355": Entry("the sampler cannot be used with this data", "Choose another `data.sampler`."),
    "SH356": Entry("the sampler needs a column", "Name a column of the data in `data.sampler`."),
    # 4xx: training
    "SH401": Entry("the model failed on a batch", "Fix the model or the data; the message is the model's own."),
    "SH402": Entry("the loss failed", "Check that the loss fits the model's output and the target."),
    "SH403": Entry("the loss is not finite", "Lower the learning rate, clip the gradients, or check the data."),
    "SH404": Entry("no parameter is trained", "Unfreeze a parameter, or give a model with parameters."),
    "SH405": Entry("a pattern matches no parameter", "Use a pattern that matches; * is a wildcard."),
    "SH406": Entry("weights do not fit the model", "Use weights of the same shapes, or init_from.strict: false."),
    "SH407": Entry("out of memory", "Lower batch_size, raise lanes, or use a smaller model."),
    "SH408": Entry("a metric failed", "Check that the metric fits the model's output and the target."),
    "SH409": Entry("a metric is not known", "Monitor a metric that the job computes."),
    "SH410": Entry("a watcher failed", "Fix the watcher's code."),
    "SH411": Entry("the device does not exist", "Use device: auto or cpu."),
    "SH412": Entry("a step is not possible with so few samples", "Raise batch_size, lower lanes, or drop_last: true."),
    "SH413": Entry("the update of the weights failed", "Fix the optimizer's or the schedule's arguments."),
    "SH415": Entry("the servers lost what they held", "Start the run again: shoal resume goes on from the checkpoint."),
    "SH417": Entry("servers cannot use the optimizer", "Use one that treats every element by itself, or sync: lanes."),
    "SH416": Entry("a server refuses a step", "Start the run again: shoal resume goes on from the checkpoint."),
    "SH418": Entry("sparse tables need servers", "Write sync: {kind: server}."),
    "SH419": Entry("the rows of a sparse table are not here",
                   "They are on the servers of a run, and in its checkpoints; see docs/sparse.md."),
    "SH420": Entry("gradients are sparse", "Use dense ones and Adam; or a shoal.SparseTable, see docs/sparse.md."),
    "SH421": Entry("the loss would depend on the number of lanes", "Use a mean over samples, or return (sum, weight)."),
    "SH422": Entry("lanes return losses of different kinds", "Return (sum, weight) for every batch, or for none."),
    "SH423": Entry("torch's fused optimizer is wrong for these parameters", "Leave `fused` out, or set it to false."),
    "SH428": Entry("the job's code ended its process",
                   "Raise an exception, or let a watcher return a reason: that stops the run and saves it."),
    "SH429": Entry("the job's code failed", "Fix the code at the line shown; the message is its own."),
    # 5xx: checkpoints
    "SH501": Entry("no valid checkpoint", "Start again with shoal run."),
    "SH502": Entry("a checkpoint is damaged", "An older valid one is used where there is one."),
    "SH503": Entry("a checkpoint could not be written", "Free some disk space or change checkpoint.path."),
    "SH504": Entry("the checkpoint belongs to another job", "Resume with the job that wrote it."),
    "SH505": Entry("the file is not a safetensors file", "Give a run, a checkpoint or a .safetensors file."),
    "SH506": Entry("the state holds something that cannot be saved",
                   "Keep to tensors, numbers, text, None, and lists, tuples and dicts of them."),
    "SH507": Entry("the checkpoint was written by a newer version", "Update Shoal."),
    "SH510": Entry("the disk is full", "Free some space, then `shoal resume` goes on from the last checkpoint."),
    # 6xx: runs and processes
    "SH601": Entry("no such run", "`shoal runs` lists the runs."),
    "SH602": Entry("the run is in use", "Wait for it, or end the process shown."),
    "SH603": Entry("a worker died", "See the worker's log; `shoal resume` goes on from the last checkpoint."),
    "SH604": Entry("the run has finished already", "Start a new one with shoal run."),
    "SH605": Entry("the run directory cannot be read or written", "Give a writable directory with --runs."),
    "SH606": Entry("the run has no result yet", "Wait until it is finished, or resume it."),
    "SH607": Entry("the engine is not available", "Use engine: local, or install what the engine needs."),
    "SH608": Entry("objects of a notebook or script cannot be sent to a worker",
                   "Put the class or function into a .py file, and guard the call by if __name__ == '__main__'."),
    "SH609": Entry("bad command line", "See --help."),
    "SH610": Entry("the driver cannot be reached",
                   "Check that the driver runs, and that its host and port can be reached from this machine."),
    "SH611": Entry("the driver cannot listen", "Give an address of this machine to listen on."),
    "SH612": Entry("no driver is running for this run", "`shoal resume` drives it again."),
    "SH613": Entry("no such worker", "Name one of the workers that the run has now."),
    "SH614": Entry("the run has folds", "Name one fold, such as RUN/fold-0."),
    "SH615": Entry("the token is missing or wrong",
                   "Set SHOAL_TOKEN to what `shoal token RUN` prints on the machine that drives the run."),
    "SH616": Entry("the receipt is of another job", "Compare with a run of the same job, lanes and length."),
    "SH617": Entry("a fault cannot be parsed",
                   "Write: kill worker 2 at step 7; or freeze, slow, kill server 1, or join at step 7."),
    "SH618": Entry("the servers are lost", "See the servers' logs; `shoal resume` goes on from the last checkpoint."),
    "SH619": Entry("the files for TLS cannot be used",
                   "Give a directory with cert.pem, key.pem and ca.pem: a certificate that this authority signed, "
                   "its key, and the authority's own certificate."),
    "SH620": Entry("the two sides do not agree on TLS",
                   "Join with --tls DIR if the job has `network.tls`, and not otherwise; one authority signs for all."),
    "SH621": Entry("no way to run the job can be taken", "See the reasons of all ways: shoal plan JOB --all."),
    "SH622": Entry("the run reports a result that its files do not have",
                   "`shoal resume` goes on from the last checkpoint; see model/ in the run directory."),
    "SH625": Entry("runs are kept in a directory of this machine, not at a URL",
                   "Give a local directory with --runs. Checkpoints may go to a URL: checkpoint.path: s3://BUCKET/DIR."),
    "SH626": Entry("a private file of the run is damaged, or other users can change or read it",
                   "Remove the file, then run `shoal resume RUN`: the driver writes a new one that only you can read."),
    "SH627": Entry("the run directory is gone", "Start a new run; leave the directory in place while it runs."),
    "SH628": Entry("the operating system allows no more files or processes", "Raise the limit, or use fewer workers."),
    "SH629": Entry("workers cannot be started in this environment", "Mend the installation."),
    "SH630": Entry("the search cannot go on as it began", "Go on with the version of Shoal that began it."),
    "SH631": Entry("the journal of a search is damaged", "Restore search.jsonl from a copy, or start a new search."),
    "SH632": Entry("a run is not a search, nor a search a run", "Name the other; `shoal runs` lists both."),
    "SH633": Entry("the search is not running", "`shoal search resume` goes on; `shoal search show` tells its state."),
    "SH634": Entry("a trial does not fit into the memory",
                   "Narrow the space, raise lanes or limits.memory, or search on a larger machine."),
    "SH635": Entry("a drawing needs matplotlib", "Install it: pip install 'shoal[plot]'."),
    "SH636": Entry("the weights depend on the number of workers",
                   "`shoal show RUN` names the step and the tensor where they part."),
    "SH641": Entry("the queue has a daemon already", "`shoal down` ends it; or use it as it is."),
    "SH642": Entry("the queue file cannot be used",
                   "Check the permissions and the disk; the runs themselves are not touched."),
    "SH643": Entry("the queue file would lie on a network file system",
                   "Give a directory on a disk of this machine: --runs DIR."),
    "SH644": Entry("the queue file is damaged",
                   "Move the directory .queue aside and keep it (sqlite3's .recover reads it); `shoal runs` lists the "
                   "runs, and `shoal resume RUN` goes on with each."),
    "SH645": Entry("the queue file was written by a newer version", "Update Shoal."),
    "SH646": Entry("no such job in the queue", "`shoal queue` lists the jobs."),
    "SH647": Entry("the job's state does not allow this", "`shoal queue` shows the states."),
    "SH648": Entry("the daemon of the queue did not start", "See its log; `shoal up` runs it in the foreground."),
    "SH651": Entry("a host cannot be reached", "Try `ssh HOST true`; check the name, the network and the firewall."),
    "SH652": Entry("ssh does not let you in", "Make `ssh -o BatchMode=yes HOST true` work: ssh-copy-id, ssh-agent."),
    "SH653": Entry("a host cannot run workers",
                   "Install the same Shoal there, and name its interpreter: engine.python, or `python` of the host."),
    "SH654": Entry("hosts would compute different bits", "Give all hosts the same versions and kind of processor."),
    "SH655": Entry("the job's directory is too large to be sent to other machines",
                   "Name what is not needed in .gitignore or .shoalignore; give large data by a URL or absolute path."),
    "SH656": Entry("Slurm gives no machine", "Try `srun --ntasks=1 hostname` with the same options."),
    "SH657": Entry("Ray gives no machine", "Try `ray status`; check engine.address, and that the cluster is up."),
    "SH659": Entry("the queue refuses this", "Ask the owner of the queue."),
    "SH660": Entry("a step of compression does not fit the model", "Use the recipe with a run of the same job."),
    "SH661": Entry("not a file of a compression",
                   "Give the recipe.json of a run that shoal compress made. If `shoal resume` says this, begin again."),
    "SH662": Entry("the model cannot be compressed in this way", "Leave the step out; see docs/compression.md."),
    "SH663": Entry("no compressed model meets the targets", "Ask for less, allow a larger drop, or train longer."),
    "SH664": Entry("a library for compression is missing", "Install it: pip install 'shoal[compress]'."),
    "SH665": Entry("the data cannot decide", "Give a larger validation part, or a larger --max-drop."),
    "SH666": Entry("the replay gives another result", "Use the same parent, versions and kind of machine."),
    "SH667": Entry("the packed model is damaged", "Compress the run again."),
    "SH668": Entry("the job cannot shrink its model", "Remove `shrink`, or what is named; see docs/compression.md."),
    "SH669": Entry("the model cannot be cut during training", "Remove `shrink`, or use another model or optimizer."),
    "SH671": Entry("the trash does not have it, or its place is taken", "`shoal trash` lists what can be restored."),
    "SH672": Entry("not a tag, or a damaged file of tags",
                   "Use up to 40 letters, digits, dots, dashes and underscores; at most 20 tags."),
    "SH673": Entry("no such log", "Name a worker or server of the run, such as worker-1."),
    "SH674": Entry("the plan of a cleanup cannot be applied", "Make a new plan: shoal gc."),
    "SH675": Entry("the web page cannot be served like this", "See --help."),
    "SH676": Entry("no such token", "`shoal tokens` lists them."),
    "SH677": Entry("a trial is steered by its search", "Stop or resume the search."),
    "SH678": Entry("no such profile", "`shoal profile RUN` makes one."),
    "SH679": Entry("no worker wrote a profile", "See the notes of the run: shoal show RUN."),
    "SH680": Entry("MLflow does not take the run", "Check the address, and that the server runs."),
    "SH681": Entry("the archive cannot be made or read", "Check the URL and your rights; nothing here has changed."),
    "SH682": Entry("the run cannot be compacted or expanded", "Wait until it has finished; nothing of it is lost."),
    "SH683": Entry("the web page does not answer this", "Check the address, the token and its role."),
    "SH690": Entry("no manifest can be made of this", "See docs/kubernetes.md."),
    # 7xx: shoal.server, servers for programs of any kind
    "SH701": Entry("servers cannot be started with this", "Change the argument of shoal.server.start that is shown."),
    "SH702": Entry("the arrays do not match those of the servers",
                   "Give an array for each name, of its shape and dtype."),
    "SH703": Entry("the servers are gone", "Start them again; start(from_=...) goes on from what was saved."),
    "SH704": Entry("no such worker, or it is connected already",
                   "Give each process a worker number of its own, from 0."),
    "SH705": Entry("the saved file cannot be used", "Give a file that `save` wrote, for the same optimizer."),
    "SH706": Entry("a step out of turn", "Push the client's current step: client.step."),
    "SH707": Entry("no answer in time", "Check that every worker runs, or give connect a longer timeout_s."),
    # 71x: known mistakes in model, loss and labels, as tasks/mistakes.py recognises them
    "SH710": Entry("class labels are floats", "Give class numbers as int64: target_as: class, or label.long()."),
    "SH711": Entry("labels are one-hot, and the loss takes class numbers", "Give label.argmax(-1)."),
    "SH712": Entry("labels do not start at 0, or are outside of 0..1", "Number the classes from 0."),
    "SH713": Entry("the model has the wrong number of outputs", "Give the last layer the number shown."),
    "SH714": Entry("the loss does not fit what is to be learnt",
                   "Classes: CrossEntropyLoss; yes or no: BCEWithLogitsLoss; numbers: MSELoss."),
    "SH715": Entry("the input does not have the shape, or the range, that a layer expects",
                   "Change the layer, or data.transform."),
    "SH716": Entry("the model's output has no gradient: argmax, round or detach in forward",
                   "Return the scores of all classes."),
    "SH717": Entry("dtypes do not fit", "Convert where the message says: x.float(), label.long()."),
    "SH718": Entry("tensors are on different devices", "Make tensors with device=x.device, or register buffers."),
    "SH719": Entry("softmax or sigmoid before a loss that applies it itself", "Return the scores without it."),
    # 72x: what jobs bring to their data
    "SH720": Entry("an augmentation does not fit the data", "Choose another one, or change data.transform."),
    "SH730": Entry("clusters cannot be made of this data", "Name columns with numbers in data.clusters.by."),
    # 80x: models of other libraries; 81x: what is made of a finished run
    "SH800": Entry("the model does not compute its loss itself", "Name a loss, or give the batch what it needs."),
    "SH801": Entry("a library that the job needs is not installed", "Install what the message names."),
    "SH802": Entry("the Hugging Face dataset cannot be used like this", "See the table of `kind: huggingface`."),
    "SH803": Entry("the frozen weights are not those that the run began with",
                   "Give the job the same base model, or start a new run."),
    "SH810": Entry("the model cannot be exported in this format", "Use another format: shoal export --help."),
    "SH811": Entry("not a model's directory", "Give a run, or the directory `model` of one, with model.json."),
    "SH812": Entry("there is nothing to predict from", "Give a file that the job's kind of source reads: --data."),
    "SH813": Entry("a prediction cannot be written as a column", "Let predict return tensors with a row per sample."),
    # 86x: the training loop
    "SH860": Entry("a step with several passes needs exact lanes", "Use `sync: lanes` without `codec` and `shard`."),
    "SH861": Entry("the optimizers of a Task do not fit its step",
                   "Let optimizers(model) return one for each name that step() yields."),
    "SH862": Entry("the phases of a step differ between lanes or steps",
                   "Yield the same names in the same order for every batch; yield None as the loss to skip one."),
    "SH863": Entry("the sync does not support a setting of the loop", "Use `sync: lanes`, or remove the setting."),
    "SH864": Entry("gradient checkpointing does not fit the model", "Name modules of the model; * is a wildcard."),
    "SH865": Entry("a step has too many passes", "Lower max_iter or max_eval of the optimizer."),
    "SH866": Entry("lazy modules are not supported here", "Give the layers their sizes, or remove `shard`."),
    "SH867": Entry("compiled code does not fit the job", "Remove `compile`, or use batches of fewer different shapes."),
    "SH830": Entry("the collate function failed", "Fix the function; the message is its own."),
    "SH831": Entry("the weights of samples cannot be used",
                   "Name a column of numbers from 0 upwards, or a .npy file with one number for each sample."),
    "SH832": Entry("the loss cannot be weighted", "Use a loss of torch.nn, or write a Task that uses batch.weight."),
    "SH833": Entry("a column cannot be encoded like this", "Choose another encoding in data.source.encode."),
    "SH834": Entry("a tar shard cannot be used", "Write shards as WebDataset does; see docs/data.md."),
    "SH835": Entry("the stream does not give the samples that it should",
                   "Let the IterableDataset give the same samples in the same order each time; check `length`."),
}  # fmt: skip


class ShoalError(Exception):
    """An error that the user can act on. `where` is a place: file and line, field, worker."""

    exit_code = EXIT_BUG

    def __init__(self, code: str, message: str, *, where: str = "", fix: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.where = where
        self.fix = fix or CATALOGUE[code].fix

    def __str__(self) -> str:
        place = f"{self.where}: " if self.where else ""
        return f"{self.code} {place}{self.message} ({self.fix})"

    def at(self, where: str) -> ShoalError:
        """The same error with another place."""
        return type(self)(self.code, self.message, where=where, fix=self.fix)

    def to_fields(self) -> dict[str, str]:
        return {"code": self.code, "message": self.message, "where": self.where, "fix": self.fix}


class JobError(ShoalError):
    """1xx and 2xx: the job file or the command line is wrong."""

    exit_code = EXIT_JOB


class DataError(ShoalError):
    """3xx: the data is wrong or cannot be read."""

    exit_code = EXIT_DATA


class TrainError(ShoalError):
    """4xx: model, loss, metric or watcher failed."""

    exit_code = EXIT_TRAIN


class CheckpointError(ShoalError):
    """5xx: a checkpoint cannot be written or read."""

    exit_code = EXIT_CHECKPOINT


class RunError(ShoalError):
    """6xx: runs, processes, engines."""

    exit_code = EXIT_RUN


class ErrorGroup(ShoalError):  # noqa: N818 - it holds several errors
    """Several errors at once: all problems of a job file are collected before any is shown."""

    def __init__(self, errors: Sequence[ShoalError]) -> None:
        first = errors[0]
        super().__init__(first.code, first.message, where=first.where, fix=first.fix)
        self.errors = list(errors)
        self.exit_code = first.exit_code

    def __str__(self) -> str:
        return "\n".join(str(error) for error in self.errors)


_FAMILIES: dict[str, type[ShoalError]] = {
    "1": JobError, "2": JobError, "3": DataError, "4": TrainError, "5": CheckpointError, "6": RunError,
    "7": RunError, "71": TrainError, "72": DataError, "73": DataError, "8": TrainError, "81": RunError, "83": DataError,
}  # fmt: skip


def error(code: str, message: str, *, where: str = "", fix: str = "") -> ShoalError:
    """The error of the right family for a code: `raise error("SH301", "no such file: a.csv")`."""
    family = _FAMILIES.get(code[2:4]) or _FAMILIES[code[2]]
    return family(code, message, where=where, fix=fix)


def error_from_fields(fields: Mapping[str, Any]) -> ShoalError:
    """The error that another process sent as an event. A code that this version does not know becomes part of the
    message of SH603."""
    code, message = str(fields.get("code", "no code")), str(fields.get("message", ""))
    if code not in CATALOGUE:
        code, message = "SH603", f"{code}: {message}"
    return error(code, message, where=str(fields.get("where", "")), fix=str(fields.get("fix", "")))


def single_errors(failure: ShoalError) -> list[ShoalError]:
    """The errors of a group, or the error itself."""
    return failure.errors if isinstance(failure, ErrorGroup) else [failure]


def plural(number: int, word: str) -> str:
    """The number with its noun, as every message says it: "1 worker", "1,024 samples"."""
    return f"{number:,} {word}" + ("" if number == 1 else "s")


def describe_exception(failure: BaseException) -> str:
    """Type and first line of any exception: also of one whose message is huge or cannot be made."""
    return _full_description(failure).splitlines()[0]


def is_out_of_memory(failure: BaseException) -> bool:
    text = describe_exception(failure)
    return isinstance(failure, MemoryError) or "out of memory" in text or "can't allocate memory" in text


def _full_description(failure: BaseException) -> str:
    name = type(failure).__name__
    try:
        text = str(failure).strip()
    except BaseException as unprintable:
        return f"{name} (its message cannot be made: {type(unprintable).__name__})"
    return f"{name}: {_shorten(text, MAX_MESSAGE)}" if text else name


def traceback_text(failure: BaseException) -> str:
    """The traceback of any exception, after those of the exceptions that led to it. Not by Python's own formatting,
    which copies a huge message several times: the driver would take the worker for hung."""
    chain: list[BaseException] = []
    following: BaseException | None = failure
    while following is not None and len(chain) < MAX_CHAIN:
        chain.insert(0, following)
        following = following.__cause__ or (None if following.__suppress_context__ else following.__context__)
    parts = [f"Traceback (most recent call last):\n{_frames(one)}{_full_description(one)}\n" for one in chain]
    return _shorten("\nthen:\n\n".join(parts), MAX_TRACEBACK)


def _frames(failure: BaseException) -> str:
    return "".join(traceback.format_tb(failure.__traceback__))


def _shorten(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most // 2]} … {text[-most // 2 :]}"


def is_disk_full(failure: BaseException) -> bool:
    """Whether a write failed for want of space: of the disk, of the user's quota, or by the limit of a file's size."""
    return isinstance(failure, OSError) and failure.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def from_os_error(failure: BaseException, *, doing: str = "", where: str = "") -> ShoalError | None:
    """The error for a full disk or an exhausted limit of the operating system; None for any other failure."""
    number = failure.errno if isinstance(failure, OSError) else None
    place = where or (str(failure.filename) if isinstance(failure, OSError) and failure.filename else "")
    prefix = f"{doing}: " if doing else ""
    if number is not None and is_disk_full(failure):
        fix = "Raise the limit of a file's size: ulimit -f unlimited." if number == errno.EFBIG else ""
        return error("SH510", f"{prefix}{os.strerror(number)}", where=place, fix=fix)
    if number == errno.ENFILE:
        message = f"{prefix}the machine has no file descriptor left"
        return error("SH628", message, where=where, fix="End other programs, or raise the limit: sysctl fs.file-max.")
    text = describe_exception(failure)
    if number == errno.EMFILE or "Too many open files" in text:
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        message = f"{prefix}the process has no file descriptor left, of {limit:,}"
        fix = f"Raise the limit: ulimit -n {max(4 * limit, 4096)}. Or use fewer workers."
        return error("SH628", message, where=where, fix=fix)
    if "can't start new thread" in text:
        return _process_limit_error(f"{prefix}a thread could not be started")
    return None


def fork_error(failure: OSError) -> ShoalError:
    """The error for a process that cannot be started: the operating system has no process, memory or descriptor."""
    reason = os.strerror(failure.errno or errno.EAGAIN)
    return from_os_error(failure) or _process_limit_error(f"a process could not be started: {reason}")


def _process_limit_error(message: str) -> ShoalError:
    limit = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    shown = "" if limit == resource.RLIM_INFINITY else f"; this user may have {limit:,} processes and threads"
    fix = "Raise the limit (ulimit -u, or the container's pids limit), free memory, or use fewer workers."
    return error("SH628", f"{message}{shown}", fix=fix)


def closest_name(word: str, allowed: Iterable[str]) -> str:
    """The allowed name that was probably meant, or ''. Case does not matter. A beginning that only one name has, such
    as `acc`, is a short form of it."""
    by_folded = {name.casefold(): name for name in allowed}
    begun = [name for name in by_folded if len(word) > 2 and name.startswith(word.casefold())]
    found = begun if len(begun) == 1 else difflib.get_close_matches(word.casefold(), by_folded, n=1, cutoff=0.6)
    return by_folded[found[0]] if found else ""


def did_you_mean(word: str, allowed: Iterable[str], *, most: int = 30) -> str:
    """A fix: the closest name, then the allowed names."""
    names = sorted(set(allowed))
    shown = ", ".join(names[:most]) + (", …" if len(names) > most else "")
    hint = f"Did you mean '{close}'? " if (close := closest_name(word, names)) else ""
    return f"{hint}Allowed: {shown}." if names else hint.strip()


def suggest_path(path: Path, *, suffixes: tuple[str, ...] = ()) -> str:
    """A fix for a path that does not exist: the closest file name and the files there, or the missing directory."""
    folder = path.parent
    if not folder.is_dir():
        while not folder.parent.is_dir():
            folder = folder.parent
        return f"There is no directory {folder}."
    names = sorted(p.name for p in folder.iterdir() if not suffixes or p.suffix in suffixes)
    shown = ", ".join(names[:MAX_SUGGESTED_FILES]) + (", …" if len(names) > MAX_SUGGESTED_FILES else "")
    close = closest_name(path.name, names)
    hint = f"Did you mean '{close}'? " if close else ""
    return f"{hint}{folder} has: {shown}." if names else f"{folder} has no such files."


def render_docs() -> str:
    """The text of docs/errors.md."""
    groups = {"1": "The job file", "2": "Names", "3": "Data and splits", "4": "Training", "5": "Checkpoints",
              "6": "Runs and processes", "70": "Servers for other programs", "71": "Known mistakes",
              "72": "Augmentation", "73": "Clusters", "80": "Models of other libraries",
              "81": "Exports and predictions"}  # fmt: skip
    lines = ["# Errors and exit codes", "",
             "Every error says what is wrong, where, and what to do. Made by `python -m shoal.errors`.", "",
             "| exit code | meaning |", "|---|---|",
             f"| {EXIT_OK} | finished |",
             f"| {EXIT_BUG} | a bug in Shoal: the traceback is shown, please report it; for `verify` and `chaos`: "
             "the weights differ |",
             f"| {EXIT_JOB} | the job file or the command line is wrong (SH1xx, SH2xx) |",
             f"| {EXIT_DATA} | the data is wrong or cannot be read (SH3xx, SH72x, SH73x, SH83x) |",
             f"| {EXIT_TRAIN} | model, loss, metric or watcher failed (SH4xx, SH86x), known mistakes (SH71x), "
             "models of other libraries (SH80x) |",
             f"| {EXIT_CHECKPOINT} | a checkpoint cannot be written or read (SH5xx) |",
             f"| {EXIT_RUN} | runs, processes, engines (SH6xx), servers for other programs (SH70x), "
             "exports and predictions (SH81x) |",
             f"| {EXIT_INTERRUPTED} | stopped by Ctrl-C; saved, `shoal resume` goes on |",
             f"| {EXIT_TERMINATED} | stopped by SIGTERM or `shoal stop`; saved, `shoal resume` goes on |"]  # fmt: skip
    for digit, title in groups.items():
        lines += ["", f"## {title}", "", "| code | what | what to do |", "|---|---|---|"]
        lines += [f"| {c} | {e.title} | {e.fix} |" for c, e in CATALOGUE.items() if c[2:].startswith(digit)]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(render_docs(), end="")
