"""What a user may get wrong in a job file, as a table: the edit, and what must be said of it.

Each row changes a good job file in one place and names the code, the line, the field and a part of the fix.
"""
# ruff: noqa: E501 (a table reads best with one row per line)

import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import ErrorGroup, ShoalError, single_errors
from shoal.spec import load_job, make_job

GOOD = """\
name: digits
seed: 1
model:
  name: net.py:Net
  args: {width: 8}
loss: CrossEntropyLoss
metrics: [accuracy]
optimizer:
  name: AdamW
  args: {lr: 1e-3}
data:
  source:
    kind: csv
    path: rows.csv
    target: y
  split:
    kind: holdout
    validation: 0.2
batch_size: 16
epochs: 2
"""

NET = """\
from math import *
class Net:
    def __init__(self, width): ...
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "net.py").write_text(NET)
    (tmp_path / "strict.py").write_text("class Strict: ...\nclass Other: ...\n")
    (tmp_path / "bad.py").write_text("x = 1\ndef f(:\n    pass\n")
    (tmp_path / "rows.csv").write_text("x,y\n1,0\n2,1\n")
    return tmp_path


def problems_of(folder: Path, text: str, *, overrides: tuple[str, ...] = ()) -> list[ShoalError]:
    (folder / "job.yaml").write_text(text)
    with pytest.raises(ShoalError) as caught:
        load_job(folder / "job.yaml", overrides=overrides)
    return single_errors(caught.value)


def line_and_field(problem: ShoalError, folder: Path) -> tuple[int, str]:
    """`…/job.yaml:12 data.split` → (12, "data.split"); line 0 where none is told."""
    match = re.fullmatch(r"job\.yaml(?::(\d+))?(?::\d+)?(?: (.*))?", problem.where.removeprefix(f"{folder}/"))
    assert match, problem.where
    return int(match[1] or 0), match[2] or ""


class Row(NamedTuple):
    old: str
    new: str
    code: str
    line: int
    field: str
    fix: str


TABLE = {
    # -- YAML itself
    "tab": Row("  name: AdamW", "\tname: AdamW", "SH102", 9, "", "spaces"),
    "tab inside": Row("    kind: csv", "  \tkind: csv", "SH102", 13, "", "spaces"),
    "unclosed bracket": Row("metrics: [accuracy]", "metrics: [accuracy", "SH102", 7, "", "missing ']'"),
    "unclosed brace": Row("epochs: 2", "args: {a: 1, b: {c: 2}\n\nepochs: 2", "SH102", 20, "", "missing '}'"),
    "bracket at the end": Row("metrics: [accuracy]", "metrics: [accuracy,", "SH102", 7, "", "missing ']'"),
    "wrong bracket": Row("metrics: [accuracy]", "metrics: [accuracy}", "SH102", 7, "", "Close it by ']'"),
    "bracket too many": Row("metrics: [accuracy]", "metrics: [accuracy]]", "SH102", 7, "", "Remove it"),
    "two commas": Row("metrics: [accuracy]", "metrics: [accuracy,, f1]", "SH102", 7, "", "single commas"),
    "no comma": Row("epochs: 2", "args: {a: 1 b: 2}", "SH102", 20, "", "single commas"),
    "unclosed quote": Row("epochs: 2", "epochs: '2", "SH102", 20, "", "missing '"),
    "tab before a value": Row("epochs: 2", "epochs:\t2", "SH102", 20, "", "a space instead"),
    "no space": Row("epochs: 2", "epochs:2", "SH102", 20, "", "`epochs: value`"),
    "no space, deep": Row("    path: rows.csv", "    path:rows.csv", "SH102", 14, "", "`path: value`"),
    "no space in braces": Row("epochs: 2", "epochs: 2\nschedule: {name:x}", "SH102", 21, "", "`name: value`"),
    "anchor twice": Row("epochs: 2", "epochs: &a 2\nclip: {norm: &a 3}", "SH102", 21, "", "Rename one"),
    "colon in a value": Row("loss: CrossEntropyLoss", "loss: a: b", "SH102", 6, "", "quotes"),
    "no colon": Row("epochs: 2", "epochs 2", "SH102", 20, "", "field: value"),
    "not lined up": Row("    path: rows.csv", "   path: rows.csv", "SH102", 14, "", "Line it up"),
    "starts with @": Row("path: rows.csv", "path: @rows.csv", "SH102", 14, "", "quotes"),
    "starts with *": Row("path: rows.csv", "path: *.csv", "SH102", 14, "", "quotes"),
    "two documents": Row("batch_size: 16", "---\nbatch_size: 16", "SH102", 19, "", "---"),
    "python object": Row("seed: 1", "seed: !!python/name:os.system", "SH102", 2, "", "YAML"),
    "list as a key": Row("seed: 1", "? [seed]\n: 1", "SH102", 2, "", "YAML"),
    "twice": Row("batch_size: 16", "seed: 3\nbatch_size: 16", "SH108", 19, "seed", "Remove one"),
    "twice, deep": Row("    target: y", "    target: y\n    path: b", "SH108", 16, "data.source.path", "Remove one"),
    # -- unknown fields
    "misspelt": Row("epochs: 2", "epoch: 2", "SH103", 20, "epoch", "Did you mean 'epochs'?"),
    "other tool's word": Row("epochs: 2", "epochs: 2\nlr: 0.1", "SH103", 21, "lr", "optimizer.args.lr"),
    "args not under args": Row("  args: {lr: 1e-3}", "  lr: 1e-3", "SH103", 10, "optimizer.lr", "optimizer.args.lr"),
    "unknown in a source": Row("    target: y", "    targt: y", "SH103", 15, "data.source.targt", "'target'"),
    "of another kind": Row("validation: 0.2", "folds: 5", "SH103", 18, "data.split.folds", "kfold"),
    "unknown in data": Row("  split:", "  spilt:", "SH103", 16, "data.spilt", "Did you mean 'split'?"),
    "of data": Row("epochs: 2", "epochs: 2\naugment: MixUp", "SH103", 21, "augment", "write data.augment"),
    "short form": Row("metrics: [accuracy]", "metrics: [acc]", "SH202", 7, "metrics.0", "Did you mean 'accuracy'?"),
    "a key that is a boolean": Row("seed: 1", "on: 1", "SH103", 2, "on", "Allowed: accumulate"),
    # -- missing fields
    "no path": Row("    path: rows.csv\n", "", "SH104", 12, "data.source.path", "Add `path:` with text"),
    "no kind": Row("    kind: csv\n", "", "SH104", 12, "data.source.kind", "csv, parquet"),
    "no name in a ref": Row("  name: net.py:Net\n", "", "SH104", 3, "model.name", "Add `name:`"),
    "no length": Row("epochs: 2\n", "", "SH104", 0, "epochs", "Add `epochs:`"),
    "no loss": Row("loss: CrossEntropyLoss\n", "", "SH104", 0, "loss", "CrossEntropyLoss"),
    "no model": Row("model:\n  name: net.py:Net\n  args: {width: 8}\n", "", "SH104", 0, "model", "Add `model:`"),
    "empty clip": Row("epochs: 2", "epochs: 2\nclip: {}", "SH104", 21, "clip.norm", "`norm:` or `value:`"),
    "empty init_from": Row("seed: 1", "init_from: {}", "SH104", 2, "init_from.path", "Add `path:`"),
    "rename nothing": Row("seed: 1", "init_from: {rename: {a: b}}", "SH104", 2, "init_from.path", "`rename`"),
    # -- wrong types
    "words for a number": Row("epochs: 2", "epochs: two", "SH105", 20, "epochs", "a whole number above 0"),
    "fraction": Row("epochs: 2", "epochs: 2.5", "SH105", 20, "epochs", "a whole number above 0"),
    "boolean for a number": Row("epochs: 2", "epochs: yes", "SH105", 20, "epochs", "a whole number"),
    "boolean for text": Row("target: y", "target: no", "SH105", 15, "data.source.target", "quotes"),
    "number for text": Row("name: digits", "name: 5", "SH105", 1, "name", "quotes"),
    "number for a ref": Row("loss: CrossEntropyLoss", "loss: 5", "SH105", 6, "loss", "package.module:name"),
    "text for a source": Row("  split:\n    kind: holdout\n    validation: 0.2", "  test: rows.csv", "SH105", 16, "data.test", "kind: csv"),
    "section for a list": Row("metrics: [accuracy]", "metrics: {a: b}", "SH105", 7, "metrics", "a list"),
    "list for args": Row("  args: {lr: 1e-3}", "  args: [1]", "SH105", 10, "optimizer.args", "name: value"),
    "number in a list of text": Row("    target: y", "    inputs: [a, 3]", "SH105", 15, "data.source.inputs.1", "quotes"),
    "text or list": Row("    target: y", "    inputs: {a: 3}", "SH105", 15, "data.source.inputs", "text or a list"),
    "not true or false": Row("seed: 1", "drop_last: maybe", "SH105", 2, "drop_last", "true or false"),
    "empty section": Row("    kind: holdout\n    validation: 0.2\n", "", "SH105", 16, "data.split", "kind"),
    "learning rate in quotes": Row("lr: 1e-3", "lr: '1e-3'", "SH105", 10, "optimizer.args.lr", "without quotes"),
    # -- out of range, not among the choices
    "zero": Row("batch_size: 16", "batch_size: 0", "SH106", 19, "batch_size", "above 0"),
    "negative seed": Row("seed: 1", "seed: -1", "SH106", 2, "seed", "of at least 0"),
    "fraction of one": Row("validation: 0.2", "validation: 1.0", "SH106", 18, "data.split.validation", "below 1"),
    "not finite": Row("epochs: 2", "epochs: 2\nclip: {norm: .inf}", "SH106", 21, "clip.norm", "finite"),
    "bad choice": Row("seed: 1", "precision: bf15", "SH106", 2, "precision", "Did you mean 'bf16'?"),
    "bad kind": Row("kind: csv", "kind: cvs", "SH106", 13, "data.source.kind", "Did you mean 'csv'?"),
    "bad kind, short": Row("  split:\n    kind: holdout\n    validation: 0.2", "  split: kfolds", "SH106", 16, "data.split", "Did you mean 'kfold'?"),
    "bad engine": Row("seed: 1", "engine: lokal", "SH106", 2, "engine", "local"),
    "bad name": Row("name: digits", "name: my digits", "SH106", 1, "name", "letters"),
    "bad workers": Row("seed: 1", "workers: many", "SH106", 2, "workers", "1..8"),
    "workers of no lanes": Row("seed: 1", "workers: auto", "SH106", 2, "workers", "`lanes`"),
    "no workers": Row("seed: 1", "workers: 0", "SH106", 2, "workers", "above 0"),
    "workers backwards": Row("seed: 1", "workers: 4..2", "SH106", 2, "workers", "2..4"),
    "bad interval": Row("seed: 1", "checkpoint: {every: 5 epochs}", "SH106", 2, "checkpoint.every", "'100 steps'"),
    "empty name": Row("loss: CrossEntropyLoss", "loss: ''", "SH106", 6, "loss", "at least 1"),
    "list too long": Row("kind: csv\n    path: rows.csv\n    target: y", "kind: images\n    path: .\n    size: [1, 2, 3]", "SH106", 15, "data.source.size", "at most 2"),
    "bad device": Row("seed: 1", "device: gpu", "SH106", 2, "device", "cuda"),
    "negative learning rate": Row("lr: 1e-3", "lr: -1", "SH106", 10, "optimizer.args.lr", "1e-3"),
    "metric not computed": Row("seed: 1", "best: {metric: acuracy}", "SH106", 2, "best.metric", "'accuracy'"),
    # -- contradictions
    "epochs and steps": Row("epochs: 2", "epochs: 2\nsteps: 9", "SH107", 21, "steps", "Keep"),
    "task and model": Row("loss: CrossEntropyLoss", "task: strict.py:Strict", "SH107", 3, "model", "Keep `task`"),
    "two clips": Row("seed: 1", "clip: {norm: 1, value: 1}", "SH107", 2, "clip.value", "Keep"),
    "more lanes than samples": Row("seed: 1", "lanes: 17", "SH107", 2, "lanes", "at least 17"),
    "workers make the lanes": Row("seed: 1", "workers: 1..32", "SH107", 2, "workers", "at least 32"),
    "too many lanes to send each": Row("batch_size: 16", "batch_size: 512\nlanes: 300\ncodec: int8", "SH110", 20, "lanes", "at most 256"),
    "ddp has no codecs": Row("seed: 1", "sync: ddp\ncodec: {kind: topk, keep: 0.1}", "SH110", 3, "codec", "Remove `codec`"),
    "one way to shard": Row("seed: 1", "shard: {kind: fsdp, size: 1}", "SH106", 2, "shard.size", "at least 2"),
    "unknown way to cut": Row("seed: 1", "shard: {kind: tensor, patterns: {a: colums}}", "SH106", 2, "shard.patterns.a", "columns"),
    "unknown shard": Row("seed: 1", "shard: fsdq", "SH106", 2, "shard", "fsdp"),
    "unknown codec": Row("seed: 1", "codec: int7", "SH106", 2, "codec", "int8"),
    "nothing is kept": Row("seed: 1", "codec: {kind: topk, keep: 0}", "SH106", 2, "codec.keep", "above 0"),
    "idle workers": Row("seed: 1", "workers: 3\nlanes: 2", "SH107", 3, "lanes", "at least 3"),
    "more copies than servers": Row("seed: 1", "sync: {kind: server, servers: 2, backups: 2}", "SH107", 2, "sync.backups", "at least 3"),
    "an average with momentum": Row("seed: 1", "sync: {kind: local, outer: average, momentum: 0.9}", "SH107", 2, "sync.momentum", "outer: nesterov"),
    "rounds of nothing": Row("seed: 1", "sync: {kind: local, every: 0}", "SH106", 2, "sync.every", ""),
    "no staleness": Row("seed: 1", "sync: {kind: server, staleness: lots}", "SH105", 2, "sync.staleness", "or inf"),
    "staleness yes": Row("seed: 1", "sync: {kind: server, staleness: yes}", "SH106", 2, "sync.staleness", "or inf"),
    "always more than always": Row("seed: 1", "faults: {pause_probability: 2}", "SH106", 2, "faults.pause_probability", "at most 1"),
    "split and validation": Row("  split:", "  validation: {kind: csv, path: rows.csv}\n  split:", "SH107", 17, "data.split", "Keep one"),
    "two tests": Row("  split:", "  test: {kind: csv, path: rows.csv}\n  split:\n    test: 0.1", "SH107", 18, "data.split.test", "Keep one"),
    "nothing left to train": Row("validation: 0.2", "validation: 0.6\n    test: 0.5", "SH107", 18, "data.split.validation", "Change"),
    "no such fold": Row("kind: holdout\n    validation: 0.2", "kind: kfold\n    fold: 5", "SH107", 18, "data.split.fold", "Change"),
    "two rhythms": Row("seed: 1", "evaluate: {every_steps: 1, every_epochs: 1}", "SH107", 2, "evaluate.every_steps", "Keep"),
    "no validation for stop_early": Row("kind: holdout\n    validation: 0.2", "kind: none\nstop_early: {}", "SH107", 18, "stop_early", "data.split"),
    "no validation for best": Row("validation: 0.2", "validation: 0\nbest: {metric: accuracy}", "SH107", 19, "best", "data.validation"),
    "metric named loss": Row("[accuracy]", "[accuracy, net.py:loss]", "SH107", 7, "metrics.1", "Rename"),
    # -- names
    "no such file": Row("net.py:Net", "nets.py:Net", "SH201", 4, "model.name", "Did you mean 'net.py'?"),
    "no such module": Row("net.py:Net", "netz.sub:Net", "SH201", 4, "model.name", "netz.py beside the job file"),
    "no such submodule": Row("CrossEntropyLoss", "torch.nn.funktional:nll_loss", "SH201", 6, "loss", "Did you mean 'torch.nn.functional'?"),
    "no such class": Row("net.py:Net", "strict.py:Strikt", "SH202", 4, "model.name", "Did you mean 'Strict'?"),
    "no such optimizer": Row("name: AdamW", "name: sgd", "SH202", 9, "optimizer.name", "Did you mean 'SGD'?"),
    "no such loss": Row("CrossEntropyLoss", "cross_entropy", "SH202", 6, "loss", "Did you mean 'CrossEntropyLoss'?"),
    "no such schedule": Row("seed: 1", "schedule: cosine", "SH202", 2, "schedule", "CosineAnnealingLR"),
    "no such metric": Row("[accuracy]", "[acuracy]", "SH202", 7, "metrics.0", "Did you mean 'accuracy'?"),
    "no such watcher": Row("seed: 1", "watchers: [tensorbord]", "SH203", 2, "watchers.0", "'tensorboard'"),
    "short model": Row("net.py:Net", "Net", "SH203", 4, "model.name", "file.py:Net"),
    "dots only": Row("CrossEntropyLoss", "torch.nn.MSELoss", "SH203", 6, "loss", "Write torch.nn:MSELoss."),
    "file without a name": Row("net.py:Net", "net.py", "SH203", 4, "model.name", "net.py:name"),
    "two colons": Row("net.py:Net", "net.py::Net", "SH203", 4, "model.name", "Write net.py:Net."),
    "syntax error": Row("net.py:Net", "bad.py:f", "SH204", 4, "model.name", "Fix this line"),
    # -- files
    "no data": Row("path: rows.csv", "path: row.csv", "SH301", 14, "data.source.path", "Did you mean 'rows.csv'?"),
    "no data directory": Row("path: rows.csv", "path: there/row.csv", "SH301", 14, "data.source.path", "no directory"),
    "glob matches nothing": Row("path: rows.csv", "path: 'part-*.csv'", "SH301", 14, "data.source.path", "has: bad.py"),
    "data with too long a name": Row(
        "path: rows.csv", f"path: {'a' * 5000}", "SH301", 14, "data.source.path", "Check the path"
    ),
    "no weights": Row("seed: 1", "init_from: {path: w.safetensors}", "SH301", 2, "init_from.path", "has: bad.py"),
}  # fmt: skip


def test_the_table_starts_from_a_good_job(folder: Path) -> None:
    (folder / "job.yaml").write_text(GOOD)
    assert load_job(folder / "job.yaml").name == "digits"


@pytest.mark.parametrize("row", TABLE.values(), ids=TABLE.keys())
def test_each_mistake_is_told_with_its_place_and_its_fix(folder: Path, row: Row) -> None:
    assert GOOD.count(row.old) == 1, "the edit must hit one place"
    (problem, *others) = problems_of(folder, GOOD.replace(row.old, row.new))
    assert not others, [str(p) for p in others]
    assert (problem.code, *line_and_field(problem, folder)) == (row.code, row.line, row.field), str(problem)
    assert row.fix in problem.fix, str(problem)


JARGON = re.compile(r"pydantic|Input should|valid dictionary|union|discriminator|NoneType|function-|constrained")


@pytest.mark.parametrize("row", TABLE.values(), ids=TABLE.keys())
def test_no_message_speaks_the_language_of_a_library(folder: Path, row: Row) -> None:
    for problem in problems_of(folder, GOOD.replace(row.old, row.new)):
        assert not JARGON.search(str(problem)), str(problem)


def test_all_problems_of_the_fields_are_told_at_once(folder: Path) -> None:
    text = GOOD.replace("epochs: 2", "epochs: two").replace("kind: csv", "kind: cvs").replace("seed: 1", "sed: 1")
    found = {(p.code, *line_and_field(p, folder)) for p in problems_of(folder, text)}
    assert found == {("SH103", 2, "sed"), ("SH106", 13, "data.source.kind"), ("SH105", 20, "epochs")}


def test_rules_names_and_files_are_told_together(folder: Path) -> None:
    text = GOOD.replace("epochs: 2\n", "").replace("AdamW", "AdamV").replace("rows.csv", "rowz.csv")
    problems = problems_of(folder, text)
    assert [p.code for p in problems] == ["SH104", "SH202", "SH301"]


def test_names_and_files_are_told_together_with_wrong_fields(folder: Path) -> None:
    text = GOOD.replace("seed: 1", "sed: 1").replace("AdamW", "AdamV").replace("rows.csv", "rowz.csv")
    found = {
        (p.code, *line_and_field(p, folder)) for p in problems_of(folder, text.replace("epochs: 2", "epochs: two"))
    }
    fields = {("SH103", 2, "sed"), ("SH105", 20, "epochs")}
    assert found == fields | {("SH202", 9, "optimizer.name"), ("SH301", 14, "data.source.path")}


def test_a_wrong_field_invents_no_problem_of_a_name(folder: Path) -> None:
    """The network needs a width: that it is missing would be said of arguments that are no mapping."""
    text = GOOD.replace("args: {width: 8}", "args: 8").replace("AdamW", "AdamV").replace("[accuracy]", "[accuracy, 5]")
    found = {(p.code, line_and_field(p, folder)[1]) for p in problems_of(folder, text)}
    assert found == {("SH105", "model.args"), ("SH105", "metrics.1"), ("SH202", "optimizer.name")}


def test_several_problems_read_one_per_line(folder: Path) -> None:
    (folder / "job.yaml").write_text(GOOD.replace("epochs: 2", "epochs: 0").replace("seed: 1", "seed: x"))
    with pytest.raises(ErrorGroup) as caught:
        load_job(folder / "job.yaml")
    assert len(str(caught.value).splitlines()) == 2
    assert caught.value.exit_code == 2


def test_a_syntax_error_in_the_users_file_names_its_line(folder: Path) -> None:
    (problem,) = problems_of(folder, GOOD.replace("net.py:Net", "bad.py:f"))
    assert f"{folder / 'bad.py'}:2" in problem.message


@pytest.mark.parametrize("text", ["", "# nothing\n", "- a\n- b\n", "just words\n", "5\n"])
def test_a_file_that_is_no_mapping(folder: Path, text: str) -> None:
    (problem,) = problems_of(folder, text)
    assert problem.code == "SH105"


def places_in(data: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    return [path, *(place for key, value in items for place in places_in(value, (*path, key)))]


def replaced(data: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    copy = data.copy()
    copy[path[0]] = replaced(data[path[0]], path[1:], value)
    return copy


FULL = {
    "model": {"name": "net.py:Net", "args": {"width": 8}}, "loss": "MSELoss", "metrics": ["f1"], "epochs": 1,
    "optimizer": {"name": "SGD", "groups": [{"match": "*", "args": {"lr": 0.1}}]}, "schedule": "StepLR",
    "data": {"source": {"kind": "images", "path": ".", "size": [8, 8]}, "split": {"kind": "kfold", "folds": 3},
             "sampler": {"kind": "balanced"}, "loader": {"workers": "auto"}},
    "workers": "1..2", "clip": {"norm": 1}, "checkpoint": {"every": "5 steps"}, "stop_early": {}, "watchers": [],
    "init_from": {"freeze": ["a"], "rename": {}}, "evaluate": {"every_steps": 1}, "export": ["program"], "engine": "local",
}  # fmt: skip
anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.sampled_from(["kind", "name"]),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3) | st.just("kind"), inner, max_size=2)
    ),
    max_leaves=4,
)


@given(st.sampled_from(places_in(FULL)[1:]), anything)
def test_whatever_stands_in_a_field_the_answer_is_a_job_or_our_own_error(place: Any, value: Any) -> None:
    data = replaced(FULL, place, value)
    try:
        make_job(data, check_names=False)
    except ShoalError as failure:
        for problem in single_errors(failure):
            assert problem.where.split(".")[0] in data, str(problem)
            assert not JARGON.search(problem.message), str(problem)
