"""Sparse: each query's keys are the pattern's, each once, whatever the lengths, the padding and the cache."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from heedful.attention import Mask
from heedful.mechanisms import Sparse
from heedful.ops import plain

PATTERNS = ("strided", "fixed")


def tensors(queries=40, keys=40, batch=2):
    return [torch.randn(batch, 3, n, 8) for n in (queries, keys, keys)]


def visible(pattern, queries, keys, stride, causal, summary=8, offset=0):
    """The pattern of the paper, pair by pair."""
    seen = torch.zeros(queries, keys, dtype=torch.bool)
    for row in range(queries):
        for j in range(keys):
            i = row + offset
            if pattern == "strided":
                here = abs(i - j) < stride or (i - j) % stride == 0
            else:
                here = i // stride == j // stride or j % stride >= stride - summary
            seen[row, j] = here and (j <= i or not causal)
    return seen


def dense(q, k, v, seen):
    q, k, v = (t.double() for t in (q, k, v))
    return (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~seen, -torch.inf).softmax(-1).nan_to_num(0) @ v


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(PATTERNS),
    st.integers(1, 45),
    st.integers(1, 50),
    st.integers(1, 12),
    st.booleans(),
    st.booleans(),
)
def test_it_equals_the_dense_matrix_of_the_pattern(pattern, length, stride, summary, causal, formula):
    q, k, v = tensors(length, length)
    wanted = dense(q, k, v, visible(pattern, length, length, stride, causal, summary))
    sparse = Sparse(pattern, stride, summary)
    if formula:
        with plain():
            found = sparse(q, k, v, Mask(causal=causal))
    else:
        found = sparse(q, k, v, Mask(causal=causal))
    torch.testing.assert_close(found.double(), wanted, atol=3e-6, rtol=1e-5)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("length, stride", [(40, 6), (36, 6), (5, 9), (13, 12), (9, 1), (600, 20)])
def test_gradients_equal_those_of_the_dense_matrix(pattern, causal, length, stride):
    qkv = [t.requires_grad_() for t in tensors(length, length)]
    seen, weights = visible(pattern, length, length, stride, causal, 2), torch.randn(2, 3, length, 8)
    found = torch.autograd.grad((Sparse(pattern, stride, 2)(*qkv, Mask(causal=causal)) * weights).sum(), qkv)
    wanted = torch.autograd.grad((dense(*qkv, seen) * weights).sum(), qkv)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


def test_the_patterns_are_those_of_the_paper():
    assert visible("strided", 8, 8, 3, True)[7].int().tolist() == [0, 1, 0, 0, 1, 1, 1, 1]
    assert visible("fixed", 8, 8, 3, True, 1)[7].int().tolist() == [0, 0, 1, 0, 0, 1, 1, 1]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_without_a_stride_it_is_the_nearest_to_the_root_of_each_texts_length(pattern):
    q, k, v = tensors(50, 50)
    keys = torch.arange(50) < torch.tensor([[50], [30]])
    out = Sparse(pattern, summary=2)(q, k, v, Mask(keys=keys))
    torch.testing.assert_close(out[:1], Sparse(pattern, 7, 2)(q[:1], k[:1], v[:1]))
    torch.testing.assert_close(out[1:, :, :30], Sparse(pattern, 5, 2)(*(t[1:, :, :30] for t in (q, k, v))))


@pytest.mark.parametrize("stride", [None, 4])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_padding_on_either_side_or_inside_changes_nothing(pattern, causal, stride):
    q, k, v = tensors()
    generator = torch.Generator().manual_seed(0)
    keys = torch.stack([torch.arange(40) >= 11, torch.rand(40, generator=generator) < 0.6])
    sparse = Sparse(pattern, stride, 3)
    out = sparse(q, k, v, Mask(causal=causal, keys=keys))
    with plain():
        torch.testing.assert_close(out, sparse(q, k, v, Mask(causal=causal, keys=keys)), atol=3e-6, rtol=1e-5)
    for entry, real in enumerate(keys):
        alone = [t[entry : entry + 1, :, real] for t in (q, k, v)]
        torch.testing.assert_close(out[entry, :, real], sparse(*alone, Mask(causal=causal))[0], atol=1e-6, rtol=1e-5)
        assert (out[entry, :, ~real] == 0).all()


def test_texts_keep_their_order_when_those_of_one_layout_go_together():
    q, k, v = tensors(batch=5)
    keys = torch.arange(40) < torch.tensor([[40], [25], [40], [0], [25]])
    whole = Sparse()(q, k, v, Mask(keys=keys))
    for entry in range(5):
        one = slice(entry, entry + 1)
        torch.testing.assert_close(whole[one], Sparse()(q[one], k[one], v[one], Mask(keys=keys[one])))


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_tokens_after_a_cache_get_what_they_get_among_all(pattern, left):
    q, k, v = tensors()
    keys = torch.arange(40) >= torch.tensor([[0], [13]]) if left else None
    sparse = Sparse(pattern, 5, 2)
    whole = sparse(q, k, v, Mask(causal=True, keys=keys))
    for start, stop in ((39, 40), (20, 21), (7, 30)):
        mask = Mask(causal=True, offset=start, keys=None if keys is None else keys[:, :stop])
        found = sparse(q[:, :, start:stop], k[:, :, :stop], v[:, :, :stop], mask)
        torch.testing.assert_close(found, whole[:, :, start:stop], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("queries, keys, offset", [(9, 40, 0), (40, 9, 0), (5, 30, 20), (8, 12, 10), (1, 40, 39)])
def test_other_queries_than_the_keys_own_equal_the_dense_matrix(pattern, causal, queries, keys, offset):
    qkv = [t.requires_grad_() for t in tensors(queries, keys)]
    seen = visible(pattern, queries, keys, 4, causal, 2, offset)
    found, wanted = Sparse(pattern, 4, 2)(*qkv, Mask(causal=causal, offset=offset)), dense(*qkv, seen)
    torch.testing.assert_close(found.double(), wanted, atol=3e-6, rtol=1e-5)
    weights = torch.randn_like(found)
    grads = [torch.autograd.grad((out * weights).sum(), qkv) for out in (found, wanted)]
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


def test_other_queries_in_steps_equal_them_at_once(monkeypatch):
    q, k, v = (t.requires_grad_() for t in tensors(17, 40))
    whole = Sparse(stride=4)(q, k, v)
    grads = torch.autograd.grad(whole.square().sum(), (q, k, v))
    monkeypatch.setattr("heedful.mechanisms.sparse.TILE", 1500)
    again = Sparse(stride=4)(q, k, v)
    torch.testing.assert_close(again, whole)
    for one, other in zip(torch.autograd.grad(again.square().sum(), (q, k, v)), grads, strict=True):
        torch.testing.assert_close(one, other)


class Largest(TorchDispatchMode):
    """The most numbers that one tensor held."""

    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, (tuple, list)) else [out]:
            self.numbers = max(self.numbers, t.untyped_storage().nbytes() // t.element_size() if isinstance(t, torch.Tensor) else 0)
        return out


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_no_matrix_of_all_pairs_is_ever_held(pattern, causal):
    length = 4096
    q, k, v = (torch.randn(1, 1, length, 16, requires_grad=True) for _ in range(3))
    with Largest() as largest:
        Sparse(pattern)(q, k, v, Mask(causal=causal)).sum().backward()
    assert largest.numbers <= 8 * length**1.5 < length**2 / 7


class Whole(TorchDispatchMode):
    """How many tensors held all tokens."""

    def __init__(self, length):
        super().__init__()
        self.length, self.count = length, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        whole = isinstance(out, torch.Tensor) and out.shape[2:] == (self.length, 16)
        self.count += whole and not any(isinstance(a, torch.Tensor) and a.data_ptr() == out.data_ptr() for a in args)  # no view
        return out


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_without_the_fused_kernel_a_long_text_takes_as_many_whole_tensors_as_a_short_one(pattern, causal):
    counts = []
    for length in (1024, 4096):
        q, k, v = (torch.randn(1, 1, length, 16, dtype=torch.float64) for _ in range(3))
        with Whole(length) as whole:
            Sparse(pattern)(q, k, v, Mask(causal=causal))
        counts.append(whole.count)
    assert counts[0] == counts[1]


def test_torch_transforms_and_the_compiler_work():
    q, k, v = tensors(20, 20)
    mask, sparse = Mask(causal=True), Sparse(stride=4)

    def loss(q, k, v):
        return sparse(q, k, v, mask).square().sum()

    qkv = [t.clone().requires_grad_() for t in (q, k, v)]
    wanted = torch.autograd.grad(loss(*qkv), qkv)
    for one, other in zip(torch.func.grad(loss, argnums=(0, 1, 2))(q, k, v), wanted, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)
    many = torch.func.vmap(lambda q, k, v: sparse(q, k, v, mask))(*(t[None].expand(2, -1, -1, -1, -1) for t in (q, k, v)))
    torch.testing.assert_close(many[1], sparse(q, k, v, mask), atol=1e-5, rtol=1e-4)
    compiled = torch.compile(loss, backend="eager")(q, k, v)
    torch.testing.assert_close(compiled, loss(q, k, v))


@pytest.mark.parametrize("wrong", [{"pattern": "dotted"}, {"stride": 0}, {"stride": 2.5}, {"summary": 0}], ids=str)
def test_settings_that_mean_nothing_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Sparse(**wrong)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_generation_with_a_cache_writes_what_it_writes_without(pattern):
    from transformers import LlamaConfig, LlamaForCausalLM

    import heedful as hd

    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, intermediate_size=32, vocab_size=50, initializer_range=0.5)).eval()
    hd.swap(model, {f"model.layers.{i}.self_attn": Sparse(pattern, stride=4, summary=1) for i in range(2)})
    prompt, real = torch.randint(1, 50, (2, 13)), torch.arange(13) >= torch.tensor([[0], [5]])
    options = {"attention_mask": real.long(), "max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    cached, whole = (model.generate(prompt, use_cache=cache, **options) for cache in (True, False))
    assert torch.equal(cached, whole)
