"""What the tests of other libraries share: their data, and the comparison of four ways to run a job."""

import random
import shutil
from pathlib import Path

import pytest

from shoal.jobs.fork_servers import make_fork_server

CODE = Path(__file__).parent / "code"
WORDS = {
    "good": ["clear", "water", "calm", "warm", "bright", "gentle", "easy", "deep", "blue", "fair"],
    "bad": ["storm", "wreck", "cold", "dark", "rough", "broken", "lost", "grey", "bitter", "foul"],
    "any": ["the", "sea", "was", "and", "we", "saw", "a", "ship", "with", "its", "crew", "near", "land", "at", "dawn"],
}


@pytest.fixture(scope="session")
def fork_server(cache):
    """Forked workers have the slow libraries already."""
    modules = ["torchmetrics", "transformers.models.bert.modeling_bert", "transformers.models.gpt2.modeling_gpt2"]
    with make_fork_server(1, modules=[*modules, "datasets", "peft", "sklearn.model_selection"]) as made:
        yield made


@pytest.fixture(scope="session")
def reviews(tmp_path_factory):
    """A directory with reviews.csv (text and label) and a tokenizer that was trained on it."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    directory = tmp_path_factory.mktemp("reviews")
    texts = [_review(random.Random(number), number % 2) for number in range(160)]
    lines = [f"{text},{'good' if number % 2 else 'bad'}" for number, text in enumerate(texts)]
    (directory / "reviews.csv").write_text("\n".join(["review,verdict", *lines]) + "\n")
    made = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    made.train_from_iterator(texts, trainers.WordPieceTrainer(vocab_size=200, special_tokens=special))
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    names = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), special, strict=True))
    PreTrainedTokenizerFast(tokenizer_object=made, **names).save_pretrained(directory / "tokenizer")
    return directory


def _review(rng, good):
    own = WORDS["good" if good else "bad"]
    return " ".join(rng.choice(own if rng.random() < 0.4 else WORDS["any"]) for _ in range(rng.randint(4, 14)))


@pytest.fixture
def job_dir(job_dir, reviews):
    """The job's directory, with the code and the data of the suite."""
    for file in CODE.iterdir():
        if file.is_file():
            shutil.copy(file, job_dir)
    shutil.copytree(reviews, job_dir, dirs_exist_ok=True)
    return job_dir


@pytest.fixture
def run_four_ways(run, resume, job_dir):
    """Run the job on 1 worker, on 2, on 2 of which one is killed, and stopped half-way and resumed on 2 workers.
    Asserts the same bits, and returns the first outcome."""

    def go(job):
        half = job["steps"] // 2
        one = run(job)
        assert one.status == "finished", one.error
        assert one.receipt.exact, one.receipt.why
        kill = {"name": "faults.py:KillAt", "args": {"steps": [half], "marks": str(job_dir)}}
        saved = {"checkpoint": job.get("checkpoint", {}) | {"every": "1 steps"}}
        others = {
            "two workers": run(job, workers=2),
            "a kill": run(job, workers=2, watchers=[kill], **saved),
            "a resume": resume(_stopped_at(run, job, half, saved).paths, sets=["workers=2"]),
        }
        assert others["a kill"].receipt.deaths_survived == 1
        for name, other in others.items():
            assert other.status == "finished", (name, other.error)
            assert other.receipt.weights_sha256 == one.receipt.weights_sha256, name
            assert other.receipt.state_sha256 == one.receipt.state_sha256, name
            assert other.receipt.metrics == one.receipt.metrics, name
        return one

    return go


def _stopped_at(run, job, step, changes):
    def look(paths, event, state):
        return "enough for today" if event.kind == "step" and event.step >= step else None

    outcome = run(job, look=look, **changes)
    assert outcome.status == "enough for today"
    return outcome
