"""Masks: transformers' mask functions, and masks written out, mean what transformers makes of them."""

import pytest
import torch
import transformers.masking_utils as hf
from hypothesis import given, settings
from hypothesis import strategies as st

from heedful.huggingface.given import dense_mask, mask_of_call
from heedful.huggingface.lazy import LazyMask, lazy_mask
from heedful.mask import Mask

PADDED = torch.tensor([[True] * 9, [True] * 6 + [False] * 3])
LEFT = PADDED.flip(1)
SEGMENTS = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2, 2]] * 2)
POSITIONS = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 0, 1]] * 2)
LEFTS = torch.tensor([0, 3])
IMAGES = torch.tensor([[-1, -1, 0, 0, 0, -1, 1, 1, -1]] * 2)

FUNCTIONS = {
    "causal": (hf.causal_mask_function, {"causal"}),
    "bidirectional": (hf.bidirectional_mask_function, set()),
    "sliding": (hf.sliding_window_causal_mask_function(3), {"causal", "window"}),
    "sliding both ways": (hf.sliding_window_bidirectional_mask_function(2), {"window"}),
    "sliding one way": (hf.sliding_window_overlay(3), {"rule"}),
    "chunked": (hf.chunked_causal_mask_function(4, LEFTS), {"causal", "segments"}),
    "two windows": (hf.and_masks(hf.sliding_window_causal_mask_function(5), hf.sliding_window_overlay(3)), {"causal", "window"}),
    "packed": (hf.packed_sequence_compatibility_function(hf.causal_mask_function, POSITIONS, SEGMENTS), {"causal", "segments"}),
    "packed sliding": (
        hf.packed_sequence_compatibility_function(hf.sliding_window_causal_mask_function(2), POSITIONS, SEGMENTS),
        {"causal", "segments", "window"},
    ),
    "packed chunked": (
        hf.packed_sequence_compatibility_function(hf.chunked_causal_mask_function(2, LEFTS * 0), POSITIONS, SEGMENTS),
        {"causal", "segments", "rule"},
    ),
    "packed with odd positions": (
        hf.packed_sequence_compatibility_function(hf.causal_mask_function, POSITIONS * 2 % 5, SEGMENTS),
        {"rule", "segments"},
    ),
    "images see each other": (hf.or_masks(hf.causal_mask_function, hf.blockwise_overlay(IMAGES)), {"rule"}),
    "padding": (hf.and_masks(hf.causal_mask_function, hf.padding_mask_function(LEFT)), {"causal", "keys"}),
    "a user's own": (lambda batch, head, query, key: (query + key + batch) % 3 > 0, {"rule"}),
    "a user's own and causal": (
        hf.and_masks(hf.causal_mask_function, lambda batch, head, query, key: (query * key) % 4 < 3),
        {"causal", "rule"},
    ),
}


def both(function, padding=None, queries=9, keys=9, start=0, first=0, **more):
    call = dict(batch_size=2, q_length=queries, kv_length=keys, q_offset=start, kv_offset=first, mask_function=function, **more)
    call |= {"attention_mask": padding, "allow_is_causal_skip": False}
    return lazy_mask(**call), hf.sdpa_mask(**call)


@pytest.mark.parametrize("padding", [None, PADDED, LEFT], ids=["none", "right", "left"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_mask_function_keeps_its_meaning(name, padding):
    function, _ = FUNCTIONS[name]
    lazy, expected = both(function, padding)
    assert torch.equal(lazy.values(), expected), f"{name}: {lazy.mask}"
    dense = lazy.mask.dense(9, 9).expand(2, 1, 9, 9)
    assert torch.equal(dense == 0, expected)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_mask_function_is_said_in_rules_where_it_can_be(name):
    function, demands = FUNCTIONS[name]
    assert both(function)[0].mask.demands == demands


def test_a_function_of_single_indices_is_asked_one_pair_at_a_time():
    def function(batch, head, query, key):
        return torch.where(PADDED[batch].sum() > 7, key <= query, key == query)

    lazy, expected = both(function, use_vmap=True)
    assert torch.equal(lazy.values(), expected)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(["causal", "sliding", "sliding both ways", "chunked", "a user's own"]),
    st.integers(1, 6),
    st.integers(0, 12),
    st.integers(0, 5),
    st.booleans(),
)
def test_caches_shift_queries_and_keys(name, queries, start, dropped, padded):
    """`dropped` keys have left a rolling cache; static caches hold keys that no token has filled yet."""
    first = min(dropped, start)
    for spare in (0, 3):
        keys = start + queries - first + spare
        padding = torch.ones(2, start + queries, dtype=torch.bool) if padded else None
        if padding is not None:
            padding[1, : (start + queries) // 2] = False
        lazy, expected = both(FUNCTIONS[name][0], padding, queries, keys, start, first)
        assert torch.equal(lazy.values(), expected), f"{name}: {lazy.mask}"


def test_rules_that_forbid_nothing_are_left_out():
    ones = torch.ones(2, 9, dtype=torch.bool)
    assert both(hf.sliding_window_causal_mask_function(9), ones)[0].mask.demands == {"causal"}
    assert both(hf.sliding_window_bidirectional_mask_function(9), ones)[0].mask.demands == set()
    assert both(hf.chunked_causal_mask_function(16, LEFTS), ones)[0].mask.demands <= {"causal", "segments"}
    empty_end = torch.arange(12)[None].expand(2, -1) < 9
    assert both(hf.causal_mask_function, empty_end, keys=12)[0].mask.demands == {"causal"}
    assert both(hf.causal_mask_function, ones, queries=1, start=8)[0].mask.demands == set()


def test_no_long_tensor_is_made():
    lazy, _ = lazy_mask(1, 10**6, 10**6, mask_function=FUNCTIONS["images see each other"][0]), None
    assert lazy.shape == (1, 1, 10**6, 10**6)
    assert lazy.untyped_storage().nbytes() == 1


def test_a_lazy_mask_stays_lazy_while_it_travels_and_is_dense_when_asked():
    lazy, expected = both(FUNCTIONS["padding"][0])
    for same in (lazy.detach(), lazy[:, :, :, :9], lazy[...], lazy.to("cpu"), lazy.contiguous(), lazy[:, :, :, :7]):
        assert isinstance(same, LazyMask)
    assert torch.equal(lazy[:, :, :, :7].values(), expected[..., :7])
    for got, truth in ((lazy[:, :, 2:4], expected[:, :, 2:4]), (~lazy, ~expected), (lazy.float(), expected.float())):
        assert not isinstance(got, LazyMask)
        assert torch.equal(got, truth)
    assert torch.equal(torch.where(lazy, 1.0, 0.0), expected.float())
    assert "True" in repr(lazy)


@pytest.mark.parametrize("name", ["keys", "causal", "causal and keys", "causal with a cache", "arbitrary", "per head", "weighted"])
def test_a_written_out_mask_is_read_as_the_simplest_mask(name):
    torch.manual_seed(0)
    causal, some = torch.ones(6, 6, dtype=torch.bool).tril(), torch.rand(2, 1, 6, 6) < 0.5
    keys = torch.tensor([[True] * 6, [True] * 4 + [False] * 2])[:, None, None]
    seen, demands = {
        "keys": (keys.expand(2, 3, 6, 6), {"keys"}),
        "causal": (causal[None, None], {"causal"}),
        "causal and keys": (causal & keys, {"causal", "keys"}),
        "causal with a cache": (causal[None, None, 4:], {"causal"}),
        "arbitrary": (some, {"rule"}),
        "per head": (torch.rand(2, 3, 6, 6) < 0.5, {"bias"}),
        "weighted": (some, {"bias"}),
    }[name]
    additive = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
    for mask_given in (additive + 0.5 if name == "weighted" else additive, seen)[: 1 if name == "weighted" else 2]:
        mask = dense_mask(mask_given)
        assert mask.demands == demands
        assert torch.equal((mask.dense(*seen.shape[2:]) > -1e30).expand(seen.shape), seen)


def test_no_mask_means_causal_where_the_module_is():
    q, k = torch.zeros(1, 2, 5, 4), torch.zeros(1, 2, 5, 4)
    module = torch.nn.Module()
    assert mask_of_call(module, q, k, None).demands == {"causal"}
    assert mask_of_call(module, q[:, :, :1], k, None).demands == set()
    assert mask_of_call(module, q, k, None, sliding_window=3).demands == {"causal", "window"}
    assert mask_of_call(module, q, k, None, is_causal=False).demands == set()
    module.is_causal = False  # type: ignore[assignment]
    assert mask_of_call(module, q, k, None).demands == set()


def test_padding_in_two_dimensions_lets_the_last_query_meet_the_last_key():
    q, k = torch.zeros(2, 2, 3, 4), torch.zeros(2, 2, 9, 4)
    mask = mask_of_call(torch.nn.Module(), q, k, PADDED.long())
    assert (mask.causal, mask.offset) == (True, 6)
    assert mask.keys is not None
    assert torch.equal(mask.keys, PADDED)


def test_a_position_bias_is_added_unless_it_is_zero():
    q, k, bias = torch.zeros(1, 2, 5, 4), torch.zeros(1, 2, 5, 4), torch.ones(1, 2, 5, 5)
    lazy = LazyMask.of(Mask(causal=True), 1, 5, 5)
    assert mask_of_call(torch.nn.Module(), q, k, lazy, position_bias=bias).demands == {"causal", "bias"}
    assert mask_of_call(torch.nn.Module(), q, k, lazy, position_bias=bias * 0).demands == {"causal"}


def test_other_masks_are_refused():
    q = torch.zeros(1, 2, 5, 4)
    with pytest.raises(TypeError, match="mask of type str"):
        mask_of_call(torch.nn.Module(), q, q, "causal")
    with pytest.raises(ValueError, match="mask must be"):
        dense_mask(torch.zeros(1, 1, 1, 5, 5))
