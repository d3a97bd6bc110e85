"""Small models with random weights, for tests that need a model but not a trained one."""

from __future__ import annotations

import torch
from transformers import (
    BertConfig,
    BertModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

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


def whisper(seed: int = 0) -> Checkpoint:
    """Hears 40 frames of 8 numbers, and writes."""
    torch.manual_seed(seed)
    sides = {
        f"{side}_{what}": n
        for side in ("encoder", "decoder")
        for what, n in (("layers", 1), ("attention_heads", 2), ("ffn_dim", 16))
    }
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    size = {"d_model": 16, "vocab_size": 50, "max_source_positions": 20, "max_target_positions": 100, "num_mel_bins": 8}
    config = WhisperConfig(**{**sides, **special, **size, "suppress_tokens": None, "begin_suppress_tokens": None})
    return Checkpoint(WhisperForConditionalGeneration(config).eval())


def words(count: int, seed: int = 0) -> str:
    """A text of that many tokens, beside the special ones."""
    generator = torch.Generator().manual_seed(seed)
    return " ".join(f"w{i}" for i in torch.randint(60, (count,), generator=generator).tolist())
