"""Small models with random weights, for tests that need a model but not a trained one."""

from __future__ import annotations

import torch
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from heedful import Checkpoint

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "vocab_size": 64}


def tokenizer() -> PreTrainedTokenizerFast:
    """One token for each word `w0` ... `w59`, with [CLS] and [SEP] around a text."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *(f"w{i}" for i in range(60))]
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)])
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    return PreTrainedTokenizerFast(tokenizer_object=made, model_max_length=48, **names)


def bert(seed: int = 0) -> Checkpoint:
    torch.manual_seed(seed)
    return Checkpoint(BertModel(BertConfig(**SIZES, max_position_embeddings=48)).eval(), tokenizer(), "tiny-bert")


def llama(seed: int = 0, positions: int = 128) -> Checkpoint:
    torch.manual_seed(seed)
    config = LlamaConfig(**SIZES, num_key_value_heads=2, max_position_embeddings=positions)
    return Checkpoint(LlamaForCausalLM(config).eval(), tokenizer(), "tiny-llama")


def words(count: int, seed: int = 0) -> str:
    """A text of that many tokens, beside the special ones."""
    generator = torch.Generator().manual_seed(seed)
    return " ".join(f"w{i}" for i in torch.randint(60, (count,), generator=generator).tolist())
