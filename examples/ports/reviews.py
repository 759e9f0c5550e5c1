"""What original_trainer.py and trainer.yaml share: a small model of `transformers`, and a dataset of token numbers."""

import datasets
import torch
from transformers import BertConfig, BertForSequenceClassification

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}  # as both draw other numbers


def bert():
    torch.manual_seed(1)  # so that the original and its port begin with the same weights
    return BertForSequenceClassification(BertConfig(vocab_size=50, num_labels=2, **SIZES, **NO_DROPOUT))


def sentences(train=True):
    """Eight tokens each. The label says whether a token below 10 is among them."""
    generator = torch.Generator().manual_seed(2 + train)
    ids = torch.randint(1, 50, (320 if train else 80, 8), generator=generator)
    labels = (ids < 10).any(1).long()
    return datasets.Dataset.from_dict({"input_ids": ids.tolist(), "labels": labels.tolist()})
