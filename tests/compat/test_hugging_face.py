"""Hugging Face: models, tokenizers and datasets."""

import json

import numpy as np
import pytest

pytestmark = pytest.mark.compat

REVIEWS = {
    "kind": "huggingface",
    "path": "reviews.csv",
    "tokenizer": "tokenizer",
    "text": "review",
    "labels": "verdict",
    "max_length": 12,
}
BERT = {
    "name": "bert",
    "model": "hf.py:bert",
    "loss": "model",
    "metrics": ["accuracy"],
    "optimizer": {"name": "AdamW", "args": {"lr": 0.003}},
    "data": {"source": REVIEWS, "split": {"kind": "holdout", "validation": 0.25, "stratify": True}},
    "batch_size": 16,
    "lanes": 4,
    "steps": 12,
    "evaluate": {"every_steps": 6},
    "checkpoint": {"every": "never"},
    "export": [],
}
TOKENS = BERT["data"] | {"source": REVIEWS | {"labels": "input_ids"}, "split": "holdout"}
GPT = BERT | {
    "name": "gpt",
    "model": "hf.py:gpt",
    "metrics": [{"name": "perplexity", "args": {"ignore_index": -100}}],
    "data": TOKENS,
}


@pytest.mark.compat("sequence classification with the model's own loss", "works", how="`loss: model`")
def test_bert_with_its_own_loss(run_four_ways):
    outcome = run_four_ways(BERT)
    assert 0.3 < outcome.receipt.metrics["accuracy"] <= 1.0


@pytest.mark.compat("causal language model, tied weights", "works", how="`loss: model`, `labels: input_ids`")
def test_gpt_with_tied_weights(run_four_ways):
    run_four_ways(GPT)


@pytest.mark.compat(
    "masked language model, labels of -100", "works", how="a dataset with `labels`; -100 is not counted"
)
def test_masked_language_model(run_four_ways):
    source = {"kind": "python", "factory": "hf.py:masked_words"}
    run_four_ways(BERT | {"model": "hf.py:masked", "metrics": [], "data": {"source": source, "split": "holdout"}})


@pytest.mark.compat("encoder and decoder (T5)", "works", how="`loss: model`; the dataset may be made by code")
def test_t5(run_four_ways):
    source = {"kind": "python", "factory": "hf.py:pairs"}
    run_four_ways(BERT | {"model": "hf.py:t5", "metrics": [], "data": {"source": source, "split": "holdout"}})


@pytest.mark.compat("`datasets` that are streamed", "works", how="`kind: python`, a function that returns the stream")
def test_a_streamed_dataset(run_four_ways):
    source = {"kind": "python", "factory": "hf.py:streamed_pairs", "window": 16}
    data = {"source": source, "split": {"kind": "holdout", "validation": 0.25, "shuffle": False}}
    outcome = run_four_ways(BERT | {"model": "hf.py:t5", "metrics": [], "data": data})
    assert outcome.receipt.samples_seen == 12 * 16  # 48 of 64 samples train: three whole batches in an epoch


@pytest.mark.compat(
    "gradient checkpointing",
    "works",
    how="`gradient_checkpointing: true`, or `gradient_checkpointing_enable()` in the model's code",
)
def test_gradient_checkpointing(run, run_four_ways):
    """The forward pass that is made again draws the same dropout."""
    outcome = run_four_ways(GPT | {"model": {"name": "hf.py:gpt", "args": {"checkpointing": True}}})
    asked = run(GPT | {"gradient_checkpointing": True})
    assert asked.receipt.weights_sha256 == outcome.receipt.weights_sha256


@pytest.mark.compat("`datasets` on disk, with its own splits", "works", how="`path:` of `save_to_disk`, `split: train`")
def test_a_dataset_dict_on_disk(run_four_ways, job_dir):
    import datasets

    whole = datasets.Dataset.from_csv(str(job_dir / "reviews.csv"))
    datasets.DatasetDict(whole.train_test_split(0.25, seed=1)).save_to_disk(job_dir / "saved")
    source = REVIEWS | {"path": "saved", "split": "train"}
    data = {"source": source, "validation": REVIEWS | {"path": "saved", "split": "test"}}
    run_four_ways(BERT | {"data": data})


@pytest.mark.compat("files that `datasets` cannot read, parts and tokenizers that are not there", "refused SH802")
def test_what_the_source_refuses(run, job_dir):
    (job_dir / "reviews.xml").write_text("<a/>")
    for change, said in (
        ({"path": "reviews.xml"}, "SH802"),
        ({"labels": "verdikt"}, "SH303"),
        ({"split": "train"}, "SH802"),
        ({"tokenizer": "reviews.csv"}, "SH802"),
    ):
        outcome = run(BERT, data={"source": REVIEWS | change, "split": "holdout"})
        assert outcome.error is not None
        assert outcome.error.code == said, (change, outcome.error)
    unknown = run(BERT, data={"source": REVIEWS | {"tokenizer": "bert-base-uncased"}, "split": "holdout"}).error
    assert unknown.code == "SH802"
    assert "from_pretrained('bert-base-uncased').save_pretrained" in unknown.fix


@pytest.mark.compat("missing labels and texts, lists with gaps", "refused SH304", how="the row is named")
@pytest.mark.parametrize(
    ("rows", "source", "row"),
    [
        ({"review": ["calm", None], "verdict": ["good", "bad"]}, REVIEWS, 1),
        ({"review": ["calm", "storm", "sea"], "verdict": ["good", "bad", None]}, REVIEWS, 2),
        ({"review": ["calm", "storm"], "verdict": [None, 1]}, REVIEWS, 0),
        ({"x": [[1, 2], [1, None, 2]], "label": [0, 1]}, {"kind": "huggingface"}, 1),
        ({"x": [[[1, 2]], [[1, None]]], "label": [0, 1]}, {"kind": "huggingface"}, 1),
        ({"x": [1, None], "label": [0, 1]}, {"kind": "huggingface"}, 1),
    ],
)
def test_missing_values(job_dir, rows, source, row):
    from datasets import Dataset

    from shoal.errors import ShoalError

    Dataset.from_dict(rows).save_to_disk(job_dir / "gaps")
    with pytest.raises(ShoalError, match=f"SH304.*row {row}: '") as caught:
        _opened(source | {"path": "gaps"}, job_dir).take(np.arange(2))
    assert "on_bad_row" not in caught.value.fix


def test_empty_lists_are_padded_and_labels_of_new_data_are_not_read(job_dir):
    from datasets import Dataset

    rows = {"x": [[], [3, 4]], "label": ["no such class", None]}
    Dataset.from_dict(rows).save_to_disk(job_dir / "new")
    source = _opened({"kind": "huggingface", "path": "new"}, job_dir, labelled=False)
    batch = source.take(np.arange(2))
    assert batch.target is None
    assert batch.inputs[0].keys() == {"x"}
    assert batch.inputs[0]["x"].tolist() == [[0, 0], [3, 4]]


def _opened(source, job_dir, **options):
    from shoal.data.source import open_source
    from shoal.spec.data import DataConfig

    return open_source(DataConfig.model_validate({"source": source}).source, base_dir=str(job_dir), **options)


@pytest.mark.compat("a model without a loss", "refused SH800", how="name a loss")
def test_a_model_without_a_loss(run):
    outcome = run(BERT, model="hf.py:encoder")
    assert outcome.error.code == "SH800"
    assert "without a loss" in outcome.error.message


def test_lanes_train_the_same_objective(job_dir, monkeypatch):
    """The loss of two lanes is the loss of one: labels that are ignored divide nothing."""
    import torch

    from shoal.tasks.own_loss import OwnLossTask

    monkeypatch.syspath_prepend(str(job_dir))
    import hf

    for model in (hf.gpt(dropout=0.0).eval(), hf.masked().eval()):
        ids = torch.randint(5, 200, (4, 8), generator=torch.Generator().manual_seed(1))
        labels = ids.masked_fill(torch.arange(8) > torch.tensor([[7], [3], [0], [5]]), -100)
        task = OwnLossTask(model, lambda example: {})
        with torch.no_grad():
            (first, m), (rest, n) = (task.loss(model, _batch(ids[r], labels[r])) for r in (slice(0, 1), slice(1, 4)))
            whole = model(input_ids=ids, labels=labels).loss
            nothing, weight = task.loss(model, _batch(ids[:1], torch.full_like(labels[:1], -100)))
        torch.testing.assert_close(((first + rest) / (m + n)).float(), whole)
        assert (float(nothing), float(weight)) == (0.0, 0.0)


def _batch(ids, labels):
    from shoal.data.batch import Batch

    return Batch(({"input_ids": ids, "labels": labels},), labels, len(ids))


@pytest.mark.compat(
    "PEFT: LoRA, only adapters in checkpoints", "works", how="`checkpoint: {frozen: false}`, `shoal export --format hf`"
)
def test_lora(run, run_four_ways, job_dir):
    from peft import PeftModel
    from transformers import BertForSequenceClassification

    import shoal
    from shoal.checkpoint.export import load_weights
    from shoal.storage.export import export

    job = BERT | {"model": "hf.py:lora", "checkpoint": {"every": "never", "frozen": False}}
    outcome = run_four_ways(job)
    saved = run(job, checkpoint={"every": "6 steps", "frozen": False})
    trained = load_weights(str(saved.paths.checkpoints))
    assert trained
    assert all("lora_" in name or "modules_to_save" in name for name in trained), list(trained)
    export(outcome.paths, "hf", job_dir / "adapter")
    assert (job_dir / "adapter" / "adapter_model.safetensors").is_file()
    assert not (job_dir / "adapter" / "model.safetensors").is_file()
    own = shoal.load(outcome.paths.root)
    base = BertForSequenceClassification(own.get_base_model().config)
    again = PeftModel.from_pretrained(base, job_dir / "adapter")
    wanted = {name: value for name, value in own.state_dict().items() if "lora_" in name}
    assert wanted
    assert all(again.state_dict()[name].equal(value) for name, value in wanted.items())


@pytest.mark.compat("a model for `from_pretrained`, with its tokenizer", "works", how="`shoal export RUN --format hf`")
def test_export_for_from_pretrained(run, job_dir):
    import torch
    from transformers import AutoTokenizer, BertForSequenceClassification

    import shoal
    from shoal.storage.export import export

    outcome = run(BERT)
    export(outcome.paths, "hf", job_dir / "saved")
    own = shoal.load(outcome.paths.root)
    again = BertForSequenceClassification.from_pretrained(job_dir / "saved").eval()
    inputs = AutoTokenizer.from_pretrained(job_dir / "saved")("the sea was calm", return_tensors="pt")
    with torch.no_grad():
        assert torch.allclose(own(**inputs).logits, again(**inputs).logits, atol=1e-6)  # another kernel of attention
    assert own.state_dict().keys() == again.state_dict().keys()
    assert all(value.equal(own.state_dict()[name]) for name, value in again.state_dict().items())


@pytest.mark.compat("predictions of new texts", "works", how="`shoal predict RUN --data new.csv`")
def test_predict_texts(run, job_dir, fork_server):
    from pyarrow import parquet

    from shoal.jobs.predictions import predict

    outcome = run(BERT)
    (job_dir / "new.csv").write_text("review\ncalm blue water\nstorm and wreck\n" * 20)
    outs = [job_dir / f"{workers}.parquet" for workers in (1, 2)]
    for workers, out in enumerate(outs, start=1):
        predict(outcome.paths, data=str(job_dir / "new.csv"), out=out, workers=workers, fork_server=fork_server)
    assert outs[0].read_bytes() == outs[1].read_bytes()
    assert set(parquet.read_table(outs[0]).column("prediction").to_pylist()) <= {"good", "bad"}


@pytest.mark.compat("ONNX of a model of transformers", "works", how="`shoal export RUN --format onnx`: its logits")
@pytest.mark.parametrize("job", [BERT, GPT], ids=["bert", "gpt"])
def test_an_exported_model_computes_the_same(run, job_dir, job):
    import onnxruntime
    import torch

    import shoal
    from shoal.storage.export import export

    outcome = run(job | {"steps": 2, "evaluate": {"every_steps": 2}})
    export(outcome.paths, "onnx", job_dir / "model.onnx")
    session = onnxruntime.InferenceSession(str(job_dir / "model.onnx"))
    generator = torch.Generator().manual_seed(1)
    named = json.loads((outcome.paths.model / "model.json").read_text())["example"][0]["named"]
    size = [4, named["input_ids"]["shape"][1]]
    made = {"input_ids": torch.randint(5, 100, size, generator=generator), "attention_mask": torch.ones(size).long()}
    made["token_type_ids"] = torch.zeros(size).long()
    given = {name: made[name] for name in named if name != "labels"}
    with torch.no_grad():
        wanted = shoal.load(outcome.paths.root)(**given).logits
    inputs = [one.name for one in session.get_inputs()]
    feed = dict(zip(inputs, (value.numpy() for value in given.values()), strict=True))
    (found,) = session.run(None, feed)
    torch.testing.assert_close(torch.from_numpy(found), wanted, rtol=1e-3, atol=1e-4)
