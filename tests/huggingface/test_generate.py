"""Generation with a cache: the seam writes the tokens that eager attention writes."""

import pytest
import torch

from heedful.huggingface import watching

from .zoo import BY_NAME, WORDS

DECODERS = (
    "gpt2",
    "opt",
    "gpt_neox",
    "llama",
    "mistral",
    "qwen3",
    "gemma2",
    "gemma3_text",
    "gpt_oss",
    "deepseek_v3",
    "llama4_text",
)
WAYS = {
    "greedy": {},
    "beams": {"num_beams": 3},
    "without a cache": {"use_cache": False},
    "static cache": {"cache_implementation": "static", "disable_compile": True},
}


def written(model, given, **more):
    torch.manual_seed(0)
    return model.generate(**given, max_new_tokens=12, min_new_tokens=12, do_sample=False, **more)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", DECODERS)
def test_decoders_write_the_same_tokens_after_left_padding(name, way):
    model = BY_NAME[name].build()
    torch.manual_seed(2)
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[1, :4] = 0
    given = {"input_ids": torch.randint(3, WORDS, (2, 9)), "attention_mask": mask}
    _same(model, given, f"{name}, {way}", **WAYS[way])


@pytest.mark.parametrize("way", ["greedy", "beams"])
@pytest.mark.parametrize("name", ["t5", "bart", "mbart", "whisper"])
def test_encoder_decoders_write_the_same_tokens(name, way):
    model = BY_NAME[name].build()
    torch.manual_seed(2)
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[1, -4:] = 0
    given = {"input_ids": torch.randint(3, WORDS, (2, 9)), "attention_mask": mask}
    if name == "whisper":
        given = {"input_features": torch.randn(2, 8, 40)}
    _same(model, given, f"{name}, {way}", **WAYS[way])


def _same(model, given, what, **more):
    calls = []
    expected = written(model, given, **more)
    with watching(model, lambda capture: calls.append(capture.layer)):
        got = written(model, given, **more)
    assert calls, f"{what}: generate passed the seam by"
    assert got.tolist() == expected.tolist(), f"{what}: wrote {got.tolist()}, eager wrote {expected.tolist()}"
