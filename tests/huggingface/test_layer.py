"""Resized attention: with the sizes it had it is its family's own; with fewer it computes what the fewer dims say."""

import copy
import pickle

import pytest
import torch

from heedful.huggingface import coverage, swap, watching
from heedful.huggingface.adopt import Unresizable, adopt, matrices, reshape, sizes_of
from heedful.huggingface.layer import Resized, Sizes
from heedful.mechanisms import Local

from .zoo import BY_NAME, WORDS

NAMES = ("bert", "roberta", "distilbert", "gpt2", "opt", "gpt_neox", "llama", "mistral", "qwen2", "vit", "whisper", "bart", "t5")
WRITERS = ("gpt2", "opt", "gpt_neox", "llama", "mistral", "qwen2", "whisper", "bart", "t5")


def adopted(model):
    other = copy.deepcopy(model)
    adopt(other)
    return other


def answer(model, given):
    dtype = next(model.parameters()).dtype
    given = {name: x.to(dtype) if torch.is_tensor(x) and x.is_floating_point() else x for name, x in given.items()}
    with torch.no_grad():
        out = model(**given)
    return out["logits"] if "logits" in out else out["last_hidden_state"]


def inputs_of(name):
    for shown, given, real in BY_NAME[name].inputs():
        yield shown, given, ... if real is None else real


@pytest.mark.parametrize("dtype, most", [(torch.float32, 1e-5), (torch.float64, 1e-10)], ids=["f32", "f64"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", NAMES)
def test_unchanged_sizes_give_the_native_output(name, attention, dtype, most):
    model = BY_NAME[name].build(attention).to(dtype)
    other = adopted(model)
    for shown, given, real in inputs_of(name):
        told = answer(model, given)[real], answer(other, given)[real]  # OPT's own eager attention gives nan in float64 for padding
        torch.testing.assert_close(*told, rtol=0, atol=most, equal_nan=True, msg=lambda m, shown=shown: f"{name}, {shown}: {m}")


@pytest.mark.parametrize("name", NAMES)
def test_the_seam_sees_every_adopted_layer_and_what_it_hands_over(name):
    model = BY_NAME[name].build("sdpa")
    other = adopted(model)
    _, given, _ = next(iter(inputs_of(name)))
    seen = {}
    for key, one in (("native", model), ("adopted", other)):
        with watching(one, seen.setdefault(key, []).append):
            answer(one, given)
    for one, two in zip(seen["native"], seen["adopted"], strict=True):
        assert (one.layer, one.mask.demands) == (two.layer, two.mask.demands)
        for x, y in ((one.q * one.scale, two.q * two.scale), (one.k, two.k), (one.v, two.v)):
            torch.testing.assert_close(x, y)
    coverage(other, lambda: answer(other, given)).check()


def uneven(sizes: Sizes) -> Sizes:
    """Every key head another size."""
    count = len(sizes.qk)
    pairs = None if sizes.pairs is None else tuple(tuple(own[i % 2 :: 2]) if i % 2 else own for i, own in enumerate(sizes.pairs))
    fewer = tuple(d - i % 3 for i, d in enumerate(sizes.qk))
    if pairs is not None:
        fewer = tuple(d - 2 * (len(own) - len(kept)) for d, own, kept in zip(sizes.qk, sizes.pairs, pairs, strict=True))
    return Sizes(sizes.heads, fewer, tuple(sizes.v[0] - (i + 1) % 3 for i in range(count)), pairs)


def rows(dims, kept_of):
    """The rows of heads of `dims` that are kept, and all of them as a mask."""
    mask, start = torch.zeros(sum(dims), dtype=torch.bool), 0
    for head, size in enumerate(dims):
        mask[[start + i for i in kept_of(head)]] = True
        start += size
    return mask


def smaller(model):
    """Two adopted copies: one with some rows zero, one without those rows."""
    zeroed, cut = adopted(model), adopted(model)
    for name, old in sizes_of(model).items():
        new, found = uneven(old), matrices(zeroed, name)
        group = old.heads // len(old.qk)

        def qk(key_head, old=old, new=new):
            if old.pairs is None:
                return range(new.qk[key_head])
            half, own = len(old.pairs[key_head]), [old.pairs[key_head].index(p) for p in new.pairs[key_head]]
            return [*own, *(half + i for i in own), *range(2 * half, old.qk[key_head])]

        keep_q = rows(old.queries, lambda h, qk=qk, group=group: qk(h // group))
        keep_k, keep_v = rows(old.qk, qk), rows(old.v, lambda h, new=new: range(new.v[h]))
        keep_o = rows(old.values, lambda h, new=new, group=group: range(new.v[h // group]))
        parts = {"q": keep_q, "b_q": keep_q, "k": keep_k, "b_k": keep_k, "v": keep_v, "b_v": keep_v}
        zeros, fewer = {}, {}
        for part, keep in parts.items():
            x = getattr(found, part)
            zeros[part] = None if x is None else x * keep.view(-1, *[1] * (x.ndim - 1))
            fewer[part] = None if x is None else x[keep]
        kind = type(found)
        reshape(zeroed, name, kind(**zeros, o=found.o, b_o=found.b_o), old)
        reshape(cut, name, kind(**fewer, o=found.o[:, keep_o], b_o=found.b_o), new)
    return zeroed, cut


@pytest.mark.parametrize("name", NAMES)
def test_heads_of_uneven_sizes_are_those_with_zeros_in_the_other_dims(name):
    zeroed, cut = smaller(BY_NAME[name].build("sdpa").double())
    assert len({d for m in cut.modules() if isinstance(m, Resized) for d in m.sizes.qk}) > 1
    for shown, given, real in inputs_of(name):
        off = (answer(zeroed, given) - answer(cut, given))[real].abs().max()
        assert off <= 1e-10, f"{name}, {shown}: {off:.1e}"


def written(model, name, **more):
    torch.manual_seed(2)
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[1, :4] = 0
    given = {"input_ids": torch.randint(3, WORDS, (2, 9)), "attention_mask": mask}
    if name in ("bart", "t5"):
        given["attention_mask"] = mask.flip(1)
    if name == "whisper":
        given = {"input_features": torch.randn(2, 8, 40)}
    return model.generate(**given, max_new_tokens=10, min_new_tokens=10, do_sample=False, **more)


@pytest.mark.parametrize("name", WRITERS)
def test_writing_with_a_cache_gives_the_same_tokens(name):
    model = BY_NAME[name].build("sdpa").double() if name != "whisper" else BY_NAME[name].build("sdpa")
    assert written(adopted(model), name).tolist() == written(model, name).tolist()
    if name == "whisper":
        return
    zeroed, cut = smaller(model)
    expected = written(zeroed, name).tolist()
    for way in ({}, {"use_cache": False}, {"num_beams": 2}):
        known = expected if way != {"num_beams": 2} else written(zeroed, name, **way).tolist()
        assert written(cut, name, **way).tolist() == known, f"{name}, {way}"


def test_the_cache_holds_the_dims_of_the_heads_alone():
    _, cut = smaller(BY_NAME["llama"].build("sdpa"))
    out = cut(torch.arange(3, 12)[None], use_cache=True)
    for layer, held in zip(cut.model.layers, out.past_key_values.layers, strict=True):
        sizes = layer.self_attn.sizes
        assert held.keys.numel() == 9 * sum(sizes.qk) < 9 * 16
        assert held.values.numel() == 9 * sum(sizes.v)


def test_static_caches_hold_uneven_heads_too():
    zeroed, cut = smaller(BY_NAME["llama"].build("sdpa").double())
    ways = {"cache_implementation": "static", "disable_compile": True}
    assert written(cut, "llama", **ways).tolist() == written(zeroed, "llama").tolist()


def test_a_swapped_mechanism_and_its_state_work_in_resized_layers():
    import heedful as hd

    zeroed, cut = smaller(BY_NAME["gpt2"].build("sdpa").double())
    told = []
    for model in (zeroed, cut):
        swap(model, {name: Local(window=4, sinks=1) for name in sizes_of(model)})
        told.append((written(model, "gpt2").tolist(), written(model, "gpt2", past_key_values=hd.cache(model)).tolist()))
    assert told[0] == told[1]


@pytest.mark.parametrize("name", ["bert", "gpt_neox", "t5"])
def test_it_trains_copies_and_pickles(name):
    _, cut = smaller(BY_NAME[name].build("sdpa").double())
    _, given, _ = next(iter(inputs_of(name)))
    out = cut.train()(**given)
    (out["logits"] if "logits" in out else out["last_hidden_state"]).square().sum().backward()
    grads = [p.grad for m in cut.modules() if isinstance(m, Resized) for p in m.parameters()]
    assert all(g is not None and torch.isfinite(g).all() for g in grads)
    cut.eval()
    for again in (copy.deepcopy(cut), pickle.loads(pickle.dumps(cut))):
        assert torch.equal(answer(again, given), answer(cut, given))
    other = copy.deepcopy(cut)
    for p in other.parameters():
        torch.nn.init.zeros_(p)
    other.load_state_dict(cut.state_dict())
    assert torch.equal(answer(other, given), answer(cut, given))


def test_half_precision_and_attentions_come_out():
    model = BY_NAME["llama"].build("eager")
    _, cut = smaller(model)
    out = cut.to(torch.bfloat16)(torch.arange(3, 12)[None], output_attentions=True)
    assert out.logits.dtype == torch.bfloat16
    assert torch.isfinite(out.logits).all()
    assert [a.shape for a in out.attentions] == [(1, 4, 9, 9)] * 2


def test_norms_of_queries_and_keys_are_refused_by_name():
    with pytest.raises(
        Unresizable, match=r"model.layers.0.self_attn \(Qwen3Attention\) norms its queries and keys \(q_norm, k_norm\)"
    ):
        adopt(BY_NAME["qwen3"].build())


def test_an_unknown_family_names_the_file_to_write():
    model = BY_NAME["phi3"].build()
    with pytest.raises(Unresizable, match=r"Phi3Attention.*huggingface/families/phi3.py"):
        adopt(model)
    assert not any(isinstance(m, Resized) for m in model.modules())


def test_some_layers_alone_may_be_adopted():
    model = BY_NAME["bert"].build("sdpa")
    assert list(adopt(model, ["encoder.layer.1.attention.self"])) == ["encoder.layer.1.attention.self"]
    assert not isinstance(model.encoder.layer[0].attention.self, Resized)


@pytest.mark.parametrize(
    "name, settings", [("bert", {"is_decoder": True, "add_cross_attention": True}), ("gpt2", {"add_cross_attention": True})]
)
def test_cross_attention_in_decoders_is_adopted_too(name, settings):
    model = BY_NAME[name].build("sdpa", **settings).double()
    other = adopted(model)
    assert len(sizes_of(other)) == 4
    states, mask = torch.randn(2, 5, 32).double(), torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    given = {"input_ids": torch.arange(3, 17).view(2, 7), "encoder_hidden_states": states, "encoder_attention_mask": mask}
    torch.testing.assert_close(answer(other, given), answer(model, given), atol=1e-10, rtol=0)
    zeroed, cut = smaller(model)
    torch.testing.assert_close(answer(zeroed, given), answer(cut, given), atol=1e-10, rtol=0)
