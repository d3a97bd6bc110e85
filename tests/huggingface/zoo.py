"""Tiny random models of many families, with inputs that show their masks: padding on either side, packing, images, audio."""
# ruff: noqa: C408 - settings read best as keywords

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import Tensor

WORDS = 60
TEXT = dict(vocab_size=WORDS, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=32, pad_token_id=0)
DECODER = TEXT | dict(num_key_value_heads=2, max_position_embeddings=64, bos_token_id=1, eos_token_id=None, head_dim=8)
VISION = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=32, image_size=16, patch_size=4)
BART = dict(
    vocab_size=WORDS,
    d_model=32,
    encoder_layers=2,
    decoder_layers=2,
    encoder_attention_heads=4,
    decoder_attention_heads=4,
    encoder_ffn_dim=32,
    decoder_ffn_dim=32,
    max_position_embeddings=64,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
    decoder_start_token_id=1,
    forced_eos_token_id=None,
)
MOE = dict(num_local_experts=4, num_experts_per_tok=2)


@dataclass(frozen=True)
class Family:
    """How to build one tiny model of a family and which inputs it takes."""

    name: str
    kind: str  # of inputs: encoder, decoder, seq2seq, image, speech, audio
    settings: dict[str, Any] = field(default_factory=dict)
    auto: str = "AutoModel"
    sharpness: float = 6.0  # tiny random models barely attend: their matrices are multiplied by this
    length: int = 11

    def build(self, attention: str = "eager", dtype: torch.dtype = torch.float32, **more: Any) -> Any:
        torch.manual_seed(0)
        config = transformers.AutoConfig.for_model(self.name, **(self.settings | more))
        kind = getattr(transformers, self.auto)
        make = kind.from_config if self.auto.startswith("Auto") else kind._from_config
        model = make(config, attn_implementation=attention, dtype=dtype).eval()
        for name, p in model.named_parameters():
            if p.ndim == 2 and "embed" not in name:
                p.data.mul_(self.sharpness)
        return model

    def inputs(self) -> Iterator[tuple[str, dict[str, Any], Tensor | None]]:
        """(what they show, the model's arguments, which outputs are of real tokens)."""
        torch.manual_seed(1)
        yield from INPUTS[self.kind](self.length)


def _ids(length: int) -> Tensor:
    return torch.randint(3, WORDS, (2, length))


def _padding(length: int, left: bool) -> Tensor:
    mask = torch.ones(2, length, dtype=torch.long)
    mask[1, -4:] = 0
    return mask.flip(1) if left else mask


def _encoder(length: int) -> Iterator:
    mask = _padding(length, left=False)
    yield "no padding", {"input_ids": _ids(length)}, None
    yield "right padding", {"input_ids": _ids(length), "attention_mask": mask}, mask.bool()


def _decoder(length: int) -> Iterator:
    yield from _encoder(length)
    mask = _padding(length, left=True)
    yield "left padding", {"input_ids": _ids(length), "attention_mask": mask}, mask.bool()


def _packed(length: int) -> Iterator:
    yield from _decoder(length)
    position = torch.cat([torch.arange(4), torch.arange(length - 4)])[None].expand(2, -1)
    yield "packed texts", {"input_ids": _ids(length), "position_ids": position, "use_cache": False}, None


def _seq2seq(length: int) -> Iterator:
    mask, decoded = _padding(length, left=False), _padding(7, left=False)
    plain = {"input_ids": _ids(length), "decoder_input_ids": _ids(7)}
    yield "no padding", plain, None
    yield "both padded", plain | {"attention_mask": mask, "decoder_attention_mask": decoded}, decoded.bool()
    yield "equal lengths", plain | {"decoder_input_ids": _ids(length), "attention_mask": mask}, None


def _image(length: int) -> Iterator:
    yield "an image", {"pixel_values": torch.randn(2, 3, 16, 16)}, None


def _speech(length: int) -> Iterator:
    yield "a spectrogram", {"input_features": torch.randn(2, 8, 40), "decoder_input_ids": _ids(7)}, None


def _audio(length: int) -> Iterator:
    yield "a wave", {"input_values": torch.randn(2, 400)}, None


def _both(length: int) -> Iterator:
    mask = _padding(length, left=False)
    text = _ids(length)
    text[:, 6] = 2  # the end of the text, which CLIP pools
    yield "image and text", {"input_ids": text, "attention_mask": mask, "pixel_values": torch.randn(2, 3, 16, 16)}, None


INPUTS: dict[str, Callable[[int], Iterator[tuple[str, dict[str, Any], Tensor | None]]]] = {
    "encoder": _encoder,
    "decoder": _decoder,
    "packed": _packed,
    "seq2seq": _seq2seq,
    "image": _image,
    "speech": _speech,
    "audio": _audio,
    "both": _both,
}

LM = "AutoModelForCausalLM"
CLIP = dict(
    text_config=TEXT | dict(max_position_embeddings=32, bos_token_id=1, eos_token_id=2), vision_config=VISION, projection_dim=16
)
WAVE = dict(conv_dim=(16, 16), conv_stride=(5, 2), conv_kernel=(10, 3), num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2)

FAMILIES: tuple[Family, ...] = (
    Family("bert", "encoder", TEXT),
    Family("roberta", "encoder", TEXT),
    Family("xlm-roberta", "encoder", TEXT),
    Family("electra", "encoder", TEXT | dict(embedding_size=16)),
    Family("albert", "encoder", TEXT | dict(embedding_size=16)),
    Family("camembert", "encoder", TEXT),
    Family("distilbert", "encoder", dict(vocab_size=WORDS, dim=32, n_layers=2, n_heads=4, hidden_dim=32)),
    Family("modernbert", "encoder", TEXT | dict(local_attention=6, global_attn_every_n_layers=2, cls_token_id=1, sep_token_id=2)),
    Family("gpt2", "decoder", dict(vocab_size=WORDS, n_embd=32, n_layer=2, n_head=4, n_positions=64, eos_token_id=None), LM),
    Family("opt", "decoder", TEXT | dict(ffn_dim=32, word_embed_proj_dim=32, max_position_embeddings=64, eos_token_id=None), LM),
    Family("gpt_neox", "packed", TEXT | dict(max_position_embeddings=64, eos_token_id=None), LM),
    Family("llama", "packed", DECODER, LM),
    Family("mistral", "packed", DECODER | dict(sliding_window=4), LM),
    Family("qwen2", "packed", DECODER, LM),
    Family("qwen3", "packed", DECODER, LM),
    Family("qwen3_moe", "packed", DECODER | dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16), LM),
    Family("gemma", "packed", DECODER, LM),
    Family("gemma2", "packed", DECODER | dict(sliding_window=4, attn_logit_softcapping=2.0, query_pre_attn_scalar=8), LM),
    Family(
        "gemma3_text",
        "packed",
        DECODER | dict(sliding_window=4, query_pre_attn_scalar=8, layer_types=["sliding_attention", "full_attention"]),
        LM,
    ),
    Family("gpt_oss", "decoder", DECODER | MOE | dict(sliding_window=4), LM),
    Family(
        "deepseek_v3",
        "packed",
        TEXT
        | dict(num_key_value_heads=4, q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=6)
        | dict(
            n_routed_experts=4, n_group=2, topk_group=1, num_experts_per_tok=2, moe_intermediate_size=16, first_k_dense_replace=1
        ),
        LM,
    ),
    Family("phi3", "packed", DECODER | dict(eos_token_id=2), LM),
    Family("olmo2", "packed", DECODER, LM),
    Family("mixtral", "packed", DECODER | MOE, LM),
    Family("granite", "packed", DECODER, LM),
    Family("cohere", "packed", DECODER, LM),
    Family("starcoder2", "packed", DECODER, LM),
    Family("stablelm", "packed", DECODER, LM),
    Family("glm", "packed", DECODER, LM),
    Family("smollm3", "packed", DECODER, LM),
    Family(
        "llama4_text",
        "packed",
        DECODER | MOE | dict(attention_chunk_size=4, intermediate_size_mlp=32, layer_types=["chunked_attention", "full_attention"]),
        LM,
    ),
    Family("vit", "image", VISION),
    Family("deit", "image", VISION),
    Family("dinov2", "image", VISION),
    Family("clip", "both", CLIP, sharpness=2.0),
    Family("clip_vision_model", "image", VISION, sharpness=2.0),
    Family("siglip_text_model", "encoder", TEXT | dict(max_position_embeddings=32), "SiglipTextModel", sharpness=1.0),
    Family(
        "whisper",
        "speech",
        BART
        | dict(num_mel_bins=8, max_source_positions=20, max_target_positions=32, suppress_tokens=None, begin_suppress_tokens=None),
        "AutoModelForSpeechSeq2Seq",
    ),
    Family("bart", "seq2seq", BART, "AutoModelForSeq2SeqLM"),
    Family("mbart", "seq2seq", BART, "AutoModelForSeq2SeqLM"),
    Family("pegasus", "seq2seq", BART, "AutoModelForSeq2SeqLM"),
    Family("marian", "seq2seq", BART, "AutoModelForSeq2SeqLM"),
    Family(
        "t5",
        "seq2seq",
        dict(vocab_size=WORDS, d_model=32, d_kv=8, d_ff=32, num_layers=2, num_heads=4, pad_token_id=0, decoder_start_token_id=1)
        | dict(relative_attention_num_buckets=8, relative_attention_max_distance=16),
        "AutoModelForSeq2SeqLM",
        sharpness=1.0,  # T5 does not scale its logits
    ),
    Family("wav2vec2", "audio", TEXT | WAVE),
    Family("hubert", "audio", TEXT | WAVE),
)
BY_NAME = {family.name: family for family in FAMILIES}
