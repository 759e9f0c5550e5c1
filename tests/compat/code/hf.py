"""What a user of Hugging Face brings: small models with random weights, and datasets."""

import datasets
import torch
import transformers
from transformers import BertConfig, BertForMaskedLM, BertForSequenceClassification, GPT2Config, GPT2LMHeadModel

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}


def bert(vocabulary=200, labels=2):
    return BertForSequenceClassification(BertConfig(vocab_size=vocabulary, num_labels=labels, **SIZES))


def masked(vocabulary=200):
    return BertForMaskedLM(BertConfig(vocab_size=vocabulary, **SIZES))


def gpt(vocabulary=200, checkpointing=False, tie=True, dropout=0.1):
    config = GPT2Config(
        vocab_size=vocabulary,
        n_positions=64,
        n_embd=32,
        n_layer=2,
        n_head=2,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        bos_token_id=0,
        eos_token_id=0,
        tie_word_embeddings=tie,
        loss_type="ForCausalLM",
    )
    model = GPT2LMHeadModel(config)
    if checkpointing:
        model.gradient_checkpointing_enable()
    return model


def llama(vocabulary=200):
    config = transformers.LlamaConfig(vocab_size=vocabulary, **SIZES | {"num_attention_heads": 4})
    return transformers.LlamaForCausalLM(config)


def t5(vocabulary=200):
    sizes = {"d_model": 32, "d_ff": 64, "d_kv": 16, "num_layers": 1, "num_heads": 2}
    config = transformers.T5Config(vocab_size=vocabulary, decoder_start_token_id=0, **sizes)
    return transformers.T5ForConditionalGeneration(config)


def lora(vocabulary=200, base=None):
    from peft import LoraConfig, get_peft_model

    model = bert(vocabulary) if base is None else BertForSequenceClassification.from_pretrained(base)
    config = LoraConfig(r=4, target_modules=["query", "value"], modules_to_save=["classifier"], task_type="SEQ_CLS")
    return get_peft_model(model, config)


def pairs():
    """A dataset made by code: inputs and labels of different lengths."""
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(5, 200, (4 + i % 5,), generator=generator).tolist() for i in range(64)]
    return datasets.Dataset.from_dict({"input_ids": rows, "labels": [row[::-1] for row in rows]})


def masked_words():
    """Sentences in which some words are to be guessed; all other labels are -100."""
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(5, 200, (64, 10), generator=generator)
    hidden = torch.rand(ids.shape, generator=generator) < 0.2
    rows = {"input_ids": ids.masked_fill(hidden, 4).tolist(), "labels": ids.masked_fill(~hidden, -100).tolist()}
    return datasets.Dataset.from_dict(rows)


def streamed_pairs():
    """The pairs as `datasets` streams them: no length, no place, and a transform on the way."""
    return pairs().to_iterable_dataset(num_shards=2).map(lambda row: row | {"attention_mask": [1] * len(row["labels"])})


def encoder(vocabulary=200):
    """It has no head, and so no loss."""

    class Encoder(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.bert = transformers.BertModel(BertConfig(vocab_size=vocabulary, **SIZES))

        def forward(self, labels=None, **inputs):
            return self.bert(**inputs)

    return Encoder()
