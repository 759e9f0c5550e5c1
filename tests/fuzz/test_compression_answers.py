"""Answers of the processes of a compression, and those that it kept in a file: a wrong one is an error with a code, or
is asked again, and no decision is made by it.

`make test` gives some hundred answers, `make test-all` 20,000.
"""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import ShoalError
from shoal.jobs.compression import workshop
from shoal.jobs.compression.workshop import Candidate, Workshop
from shoal.spec.compression.measured import Artefact, Quality
from shoal.spec.compression.steps import OnnxStep, PackStep, ZeroStep
from shoal.spec.load import make_job
from tests.conftest import MLP, long_only
from tests.fuzz.grammar import damaged, mutated, raw_bytes
from tests.fuzz.test_files import examples

FEW, MANY = 80, 20_000
FILE = {"path": "model.safetensors", "size_bytes": 10, "sha256": "a" * 64, "difference": 0.5}
CUT = {"kind": "cut", "layers": {"0": {"out": "0-3,5"}}}
SHAPED = {"steps": [CUT], "weights": FILE, "parameters": 5, "removed": {"0": 1}, "refused": {"1": "its bias is used"}}
CERTIFICATE = {"claim": "proven", "low": 0.0, "high": 1.0, "samples": 3, "points": 4, "difference_float64": 0.0,
               "difference_float32": 1e-7, "difference_points": 0.0}  # fmt: skip
QUALITY = {"name": "0", "part": "validation", "metric": "accuracy", "samples": 9, "parent": 0.9, "value": 0.8,
           "drop": 0.1, "drop_bound": 0.2, "smallest_bound": 0.01, "changed": 2}  # fmt: skip
LATENCY = {"seconds": {"1": 1e-4, "64": 1e-3}, "ratios": {"1": {"median": 1.0, "low": 0.9, "high": 1.1}}}
FACTS = {"weights_sha256": "b" * 64, "parameters": 5, "samples": {"train": 3}, "skipped": ["model.pt2: why"],
         "platform": {"torch": "2"}}  # fmt: skip
ANSWERS = {
    "describe": SHAPED,
    "lossless": SHAPED | {"certificate": CERTIFICATE},
    "zero": SHAPED,
    "pack": FILE,
    "onnx": FILE,
    "int8": FILE,
    "ranges": {"ranges": {"input": [0.0, 1.0]}},
    "scores": {"path": "scores", "lanes": [0]},
    "prune": SHAPED,
    "quality": {"found": [QUALITY]},
    "latency": {"found": [LATENCY | {"name": "a"}, LATENCY | {"name": "b"}]},
    "layers": {"weights": {"0": 12}},
    "kept_by_layer": {"keep": {"0": 0.5}},
    "export": FACTS,
}
PARENT = Candidate("parent", Artefact(**FILE), Artefact(**FILE))
QUESTIONS = {
    "describe": lambda shop: shop.open_parent("weights"),
    "lossless": lambda shop: shop.propose(PARENT, "lossless", "name", claim="proven", box="all"),
    "zero": lambda shop: shop.take(PARENT, ZeroStep(keep={"0": 0.5})),
    "pack": lambda shop: shop.take(PARENT, PackStep(bits=8)),
    "int8": lambda shop: shop.take(PARENT, OnnxStep(bits=8, samples=10)),
    "prune": lambda shop: shop.prune(PARENT, "name", remove=0.5, importance="fisher"),
    "quality": lambda shop: check_quality(shop.judge(PARENT)),
    "latency": lambda shop: check_latency(shop.time({"a": PARENT, "b": PARENT})),
    "layers": lambda shop: shop.layers(PARENT, packed=True),
    "kept_by_layer": lambda shop: ZeroStep(keep=shop.kept_by_layer(PARENT, 0.5)),
    "export": lambda shop: shop.export(PARENT, out="x"),
}


def check_quality(found):
    assert isinstance(found, Quality)
    assert found.samples > 0


def check_latency(found):
    assert [one.name for one in found] == ["a", "b"]
    assert [found[0].seconds[size] / one for size, one in found[1].seconds.items()]


class Said:
    """Stands for the processes: answers each question with what it is told to say, else as it should be."""

    def __init__(self):
        self.wrong, self.asked = {}, []

    def probe_steps(self, probe, job, fork_server, *, action, arguments):
        self.asked.append(action)
        return self.wrong.get(action, ANSWERS[action])
        yield


@pytest.fixture
def said(monkeypatch):
    made = Said()
    monkeypatch.setattr(workshop, "probe_steps", made.probe_steps)
    return made


@pytest.fixture
def shop(tmp_path, said):
    job = make_job(MLP | {"lanes": 4, "workers": 2}, base_dir=str(tmp_path), check_names=False)
    return open_shop(job, tmp_path / "work")


def open_shop(job, folder):
    made = Workshop(job, folder, fork_server=None)
    made.parent = PARENT
    return made


@pytest.mark.parametrize("count", [FEW, *long_only(MANY)])
def test_a_wrong_answer_is_an_error_with_a_code(shop, said, count):
    outcomes = []

    @examples(count)
    @given(st.sampled_from(sorted(QUESTIONS)), st.data())
    def attack(question, data):
        shop._answers._known.clear()
        action = data.draw(st.sampled_from(sorted({question, *DETAILS.get(question, ())})))
        said.wrong = {action: data.draw(mutated(ANSWERS[action]))}
        before = len(said.asked)
        try:
            QUESTIONS[question](shop)
            outcomes.append("taken")
        except ShoalError as failure:
            if failure.code != "SH603":
                raise
            outcomes.append("refused")
        assert len(said.asked) > before

    attack()
    assert len(outcomes) >= count
    assert count // 20 < outcomes.count("taken") < len(outcomes) // 2


DETAILS = {"int8": ("onnx", "ranges"), "prune": ("scores",)}
"""What else is asked on the way."""


def test_right_answers_are_taken(shop, said):
    for ask in QUESTIONS.values():
        ask(shop)
    assert set(said.asked) == set(ANSWERS)


@pytest.mark.parametrize("count", [FEW // 2, *long_only(MANY // 10)])
def test_a_damaged_answer_that_was_kept_is_asked_again(shop, said, count):
    """Files that an answer names must be there, so these questions are those without files."""
    questions = ("quality", "latency", "layers", "kept_by_layer", "export")
    path = shop.folder / "answers.jsonl"
    for name in questions:
        QUESTIONS[name](shop)
    sound = path.read_bytes()
    outcomes = []

    @examples(count)
    @given(st.data())
    def attack(data):
        rows = [json.loads(line) for line in sound.splitlines()]
        how = data.draw(st.sampled_from(["answer", "row", "bytes", "raw"]))
        at = data.draw(st.integers(0, len(rows) - 1))
        if how == "answer":
            rows[at]["answer"] = data.draw(mutated(rows[at]["answer"]))
        if how == "row":
            rows[at] = data.draw(mutated(rows[at]))
        content = b"".join(json.dumps(row).encode() + b"\n" for row in rows)
        if how in ("bytes", "raw"):
            content = data.draw(damaged(sound)) if how == "bytes" else sound + data.draw(raw_bytes) + b"\n" + sound
        path.write_bytes(content)
        said.asked.clear()
        again = open_shop(shop.job, shop.folder)
        for name in questions:
            QUESTIONS[name](again)
        outcomes.append(len(said.asked))

    attack()
    assert len(outcomes) >= count
    assert {0, 1} <= set(outcomes), "some are kept, and some asked again"
