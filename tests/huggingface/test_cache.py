"""Decoding from states: with the cache a swapped model writes what it writes when it reads everything again for each token."""

import copy

import pytest
import torch
import transformers
from contracts.test_mechanisms import SETTINGS

import heedful as hd
from heedful.huggingface import attention_modules
from heedful.mechanisms import ALL, Hard, Local, Performer

from .zoo import BY_NAME, WORDS

pytestmark = pytest.mark.filterwarnings("ignore:Performer")

MODELS = {"llama": {}, "gpt2": {}, "mistral": {"sliding_window": None}, "gemma": {}, "qwen3": {}}
REMEMBERING = [m for m in ALL if "state" in m.supports]
every = pytest.mark.parametrize("kind", [pytest.param(m, id=m.__name__) for m in REMEMBERING])
bounded = pytest.mark.parametrize("kind", [pytest.param(m, id=m.__name__) for m in REMEMBERING if not m.keeps_all])
growing = pytest.mark.parametrize("kind", [pytest.param(m, id=m.__name__) for m in REMEMBERING if m.keeps_all])


def make(kind):
    return kind(**SETTINGS.get(kind.__name__, {}))


def model_with(name, make_one, layers=slice(None), **settings):
    """A tiny model with a mechanism of its own in each of these layers."""
    model = BY_NAME[name].build(**settings)
    hd.swap(model, {name: make_one() for name in list(attention_modules(model))[layers]})
    return model


def prompt(length=20):
    torch.manual_seed(2)
    mask = torch.ones(2, length, dtype=torch.long)
    mask[1, :7] = 0
    return {"input_ids": torch.randint(3, WORDS, (2, length)), "attention_mask": mask}


def written(model, given, new=20, **more):
    more = {"use_cache": False} | more if "past_key_values" not in more else more
    more = {
        "no_repeat_ngram_size": 2
    } | more  # a token said over and over has rotated keys at equal distances: rounding picks clusters
    return model.generate(
        **given, max_new_tokens=new, min_new_tokens=new, do_sample=False, return_dict_in_generate=True, output_logits=True, **more
    )


def same(found, wanted):
    assert found.sequences.tolist() == wanted.sequences.tolist()
    if found.logits is not None and "beam_indices" not in found:
        for one, other in zip(found.logits, wanted.logits, strict=True):
            assert torch.allclose(one, other, atol=1e-4 * max(1.0, float(other.abs().max())))


@pytest.mark.parametrize("way", [{}, {"num_beams": 3}, {"prefill_chunk_size": 6}], ids=["greedy", "beams", "prefill in chunks"])
@pytest.mark.parametrize("name", MODELS)
@every
def test_tokens_and_logits_equal_those_of_reading_everything_again(kind, name, way):
    model, given = model_with(name, lambda: make(kind), **MODELS[name]), prompt()
    wanted = written(model, given, **{n: x for n, x in way.items() if n == "num_beams"})
    same(written(model, given, past_key_values=hd.cache(model), **way), wanted)


@every
def test_layers_with_a_state_stand_beside_layers_with_keys(kind):
    model, given = model_with("llama", lambda: make(kind), slice(1, 2)), prompt()
    kept = hd.cache(model)
    same(written(model, given, past_key_values=kept), written(model, given))
    assert kept.layers[0].keys.shape[-2] == 39
    assert kept.bytes == kept.layers[1].state.bytes + 2 * kept.layers[0].keys.numel() * 4


@every
def test_a_chat_goes_on_with_the_same_cache(kind):
    model, given, kept = model_with("llama", lambda: make(kind)), prompt(), None
    kept = hd.cache(model)
    for turn in range(3):
        found = written(model, given, 9, past_key_values=kept)
        same(found, written(model, given, 9))
        said = torch.cat([found.sequences, torch.randint(3, WORDS, (2, 4 + turn))], 1)
        more = torch.ones(2, said.shape[1] - given["attention_mask"].shape[1], dtype=torch.long)
        given = {"input_ids": said, "attention_mask": torch.cat([given["attention_mask"], more], 1)}


@every
def test_a_copied_cache_starts_two_texts_from_one_beginning(kind):
    model, given = model_with("llama", lambda: make(kind)), prompt()
    kept = hd.cache(model)
    with torch.no_grad():
        model(**given, position_ids=places(given["attention_mask"]), past_key_values=kept)
    for seed in (3, 4):
        torch.manual_seed(seed)
        longer = {
            "input_ids": torch.cat([given["input_ids"], torch.randint(3, WORDS, (2, 5))], 1),
            "attention_mask": torch.nn.functional.pad(given["attention_mask"], (0, 5), value=1),
        }
        same(written(model, longer, 5, past_key_values=copy.deepcopy(kept)), written(model, longer, 5))
    assert kept.get_seq_length() == 20


@bounded
def test_memory_is_bounded_while_tokens_are_written(kind):
    model = model_with("llama", lambda: make(kind))
    held, exact, ids = hd.cache(model), transformers.DynamicCache(config=model.config), torch.randint(3, WORDS, (2, 160))
    sizes, grown = [], []
    with torch.no_grad():
        for new in (ids[:, :60], *ids[:, 60:].split(1, 1)):
            model(new, past_key_values=held)
            model(new, past_key_values=exact)
            sizes.append(held.bytes)
            grown.append(exact.layers[0].keys.shape[-2])
    assert max(sizes[50:]) == max(sizes[:51]) > 0
    assert grown == list(range(60, 161))


@growing
def test_a_state_that_keeps_all_keys_grows_as_they_do(kind):
    model, sizes = model_with("llama", lambda: make(kind)), []
    held, ids = hd.cache(model), torch.randint(3, WORDS, (2, 360))
    with torch.no_grad():
        for new in ids.split(120, 1):
            model(new, past_key_values=held)
            sizes.append(held.bytes)
    assert sizes[0] < sizes[1] < sizes[2] < 3 * sizes[0]


@every
def test_a_batch_is_repeated_chosen_from_and_begun_again(kind):
    model, given = model_with("llama", lambda: make(kind)), prompt()
    kept, twice = hd.cache(model), torch.tensor([0, 0, 1, 1])
    given["position_ids"] = places(given["attention_mask"])
    with torch.no_grad():
        first = model(**given, past_key_values=kept).logits
        kept.batch_repeat_interleave(2)
        ids, mask = torch.randint(3, WORDS, (4, 1)), torch.ones(4, 1, dtype=torch.long)
        mask = torch.cat([given["attention_mask"][twice], mask], 1)
        whole = model(
            torch.cat([given["input_ids"][twice], ids], 1), attention_mask=mask, use_cache=False, position_ids=places(mask)
        )
        kept.batch_select_indices(torch.tensor([3, 1]))
        step = {"attention_mask": mask[[3, 1]], "position_ids": places(mask)[[3, 1], -1:]}
        after = model(ids[[3, 1]], past_key_values=kept, **step).logits
        assert torch.allclose(after[:, -1], whole.logits[[3, 1], -1], atol=1e-3)
        kept.reset()
        assert kept.bytes == kept.get_seq_length() == 0
        again = model(**given, past_key_values=kept).logits
    assert torch.equal(first, again)


def places(mask):
    return (mask.cumsum(-1) - 1).clamp_min(0)


@pytest.mark.parametrize("way", [{}, {"num_beams": 3}], ids=["greedy", "beams"])
@pytest.mark.parametrize("name", ["bart", "whisper"])
@every
def test_the_decoder_of_an_encoder_decoder_keeps_states_too(kind, name, way):
    model = BY_NAME[name].build()
    hd.swap(model, {n: make(kind) for n in attention_modules(model) if "decoder" in n and "self_attn" in n})
    given = prompt() | {"attention_mask": prompt()["attention_mask"].flip(1)}
    given, kept = given if name == "bart" else {"input_features": torch.randn(2, 8, 40)}, hd.cache(model)
    settings = {"max_new_tokens": 20, "min_new_tokens": 20, "do_sample": False} | way
    found = model.generate(**given, **settings, past_key_values=kept)
    assert found.tolist() == model.generate(**given, **settings, use_cache=False).tolist()
    states = [layer.state.bytes for layer in kept.self_attention_cache.layers]
    assert kept.bytes > sum(states) > 0


@every
def test_a_watcher_sees_the_prompt_and_then_the_layers_that_keep_their_keys(kind):
    model, seen = model_with("llama", lambda: make(kind), slice(1, 2)), []
    with hd.watching(model, lambda capture: seen.append((capture.layer, capture.k.shape[-2]))):
        written(model, prompt(), 3, past_key_values=hd.cache(model))
    first, second = attention_modules(model)
    assert seen == [(first, 20), (second, 20), (first, 21), (first, 22)]


@pytest.mark.parametrize("name", ["mistral", "gemma3_text"])
def test_a_window_narrower_than_the_models_own_is_honoured(name):
    model, given = model_with(name, lambda: Local(window=3)), prompt()
    same(written(model, given, past_key_values=hd.cache(model)), written(model, given))


def test_in_a_mixed_model_some_sliding_layers_keep_states():
    model, given = model_with("gemma3_text", lambda: Local(window=4), slice(0, 1), layer_types=["sliding_attention"] * 2), prompt()
    same(written(model, given, past_key_values=hd.cache(model)), written(model, given))


@pytest.mark.parametrize("mechanism", [Local(window=5), Local(window=4, sinks=1)], ids=repr)
def test_a_state_that_sees_beyond_the_models_own_window_is_refused(mechanism):
    with pytest.raises(hd.Unsupported, match=r"layers.0.self_attn: .* own window of 4 tokens; use Local\(window=4\)"):
        hd.cache(model_with("mistral", lambda: mechanism, slice(0, 1)))


@pytest.mark.parametrize("name, rule", [("gpt_oss", "null logits"), ("llama4_text", "packed texts"), ("t5", "additive bias")])
def test_rules_that_a_state_cannot_honour_are_refused_with_the_layer(name, rule):
    settings = {"gpt_oss": {"sliding_window": 40, "layer_types": ["full_attention"] * 2}}.get(name, {})
    model = model_with(name, lambda: Local(window=4), slice(0, 1) if name != "t5" else slice(0, 0), **settings)
    if name == "t5":
        hd.swap(model, {"decoder.block.0.layer.0.SelfAttention": Local(window=4)})
    with pytest.raises(hd.Unsupported, match=rf"0\..*: its state cannot honour .*{rule}.*use_cache=False"):
        written(model, prompt(), past_key_values=hd.cache(model))


@every
def test_another_model_another_swap_and_a_failed_call_are_noticed(kind):
    model, other = model_with("llama", lambda: make(kind)), model_with("llama", lambda: make(kind))
    with pytest.raises(ValueError, match="made for another model"):
        written(other, prompt(), past_key_values=hd.cache(model))
    stock, kept = BY_NAME["llama"].build(), hd.cache(model)
    with pytest.raises(ValueError, match="made for another model"):
        written(stock, prompt(), past_key_values=kept)
    kept = hd.cache(model)
    hd.swap(model, {name: make(kind) for name in attention_modules(model)})
    with pytest.raises(ValueError, match="make a new cache"):
        written(model, prompt(), past_key_values=kept)
    kept = hd.cache(model)
    hd.unswap(model)
    with pytest.raises(ValueError, match="make a new cache"):
        written(model, prompt(), past_key_values=kept)


@every
def test_what_would_take_tokens_back_is_refused_with_the_reason(kind):
    model = model_with("llama", lambda: make(kind))
    kept = hd.cache(model)
    assert not kept.is_croppable
    one = {name: x[:1] for name, x in prompt().items()}
    with pytest.raises(hd.Unsupported, match="assisted decoding takes rejected tokens back, which the state"):
        written(model, one, past_key_values=kept, assistant_model=BY_NAME["llama"].build())
    written(model, prompt(), 3, past_key_values=kept)
    with pytest.raises(hd.Unsupported, match=r"crop\(-2\) takes tokens back"):
        kept.crop(-2)


@every
def test_gradients_future_sight_and_a_changed_past_are_refused(kind):
    model, given = model_with("llama", lambda: make(kind)), prompt()
    with pytest.raises(hd.Unsupported, match="keeps no gradient"):
        model(**given, past_key_values=hd.cache(model))
    with torch.no_grad(), pytest.raises(hd.Unsupported, match="see later ones"):
        model(given["input_ids"], attention_mask=torch.ones(2, 1, 20, 20, dtype=torch.bool), past_key_values=hd.cache(model))
    kept = hd.cache(model)
    with torch.no_grad():
        model(**given, past_key_values=kept)
        with pytest.raises(ValueError, match=r"20, 20.* but the cache has read .*20, 13"):
            model(given["input_ids"], attention_mask=torch.ones(2, 40, dtype=torch.long), past_key_values=kept)


def test_mechanisms_without_a_state_keep_all_keys():
    model, given = model_with("llama", Hard), prompt()
    kept = hd.cache(model)
    same(written(model, given, past_key_values=kept), written(model, given))
    assert [layer.keys.shape[-2] for layer in kept.layers] == [39, 39]
    assert kept.is_croppable


def test_a_stock_cache_serves_a_mechanism_with_a_state_too():
    model, given = model_with("llama", lambda: Local(window=5, sinks=2)), prompt()
    same(written(model, given, use_cache=True), written(model, given))
    model = model_with("llama", lambda: Performer(features=32))
    same(written(model, given, use_cache=True), written(model, given))
