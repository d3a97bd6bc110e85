"""A mask says which keys a query may look at."""

import dense
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from heedful.attention import Mask, Rule


@st.composite
def masks(draw):
    """(mask, queries, keys): any mixture of rules."""
    queries, keys = draw(st.integers(1, 9)), draw(st.integers(1, 12))
    offset = draw(st.integers(0, max(0, keys - queries)))
    window = draw(st.none() | st.integers(1, 6))
    flags = st.lists(st.booleans(), min_size=2 * keys, max_size=2 * keys)
    real = draw(st.none() | flags.map(lambda x: torch.tensor(x).view(2, keys)))
    fits = offset + queries <= keys
    texts = draw(st.none() | flags.map(lambda x: torch.tensor(x).view(2, keys).cumsum(-1))) if fits else None
    mask = Mask(
        causal=draw(st.booleans()),
        keys=real,
        window=window,
        sinks=draw(st.integers(0, 3)) if window else 0,
        segments=texts,
        offset=offset,
        rule=draw(st.sampled_from([None, Rule(dense.same_parity, 2)])),
    )
    return mask, queries, keys


def sees(mask: Mask, b: int, i: int, j: int) -> bool:
    """One pair of tokens, spelled out."""
    place = i + mask.offset
    if mask.causal and j > place:
        return False
    if mask.window is not None and abs(place - j) >= mask.window:
        order = j if mask.keys is None else int(mask.keys[b, : j + 1].sum()) - 1
        if order >= mask.sinks:
            return False
    if mask.keys is not None and not mask.keys[b, j]:
        return False
    if mask.segments is not None and mask.segments[b, place] != mask.segments[b, j]:
        return False
    return mask.rule is None or (place - j) % (2 + b) == 0


@settings(deadline=None, max_examples=150)
@given(masks())
def test_a_pair_is_visible_when_every_rule_allows_it(case):
    mask, queries, keys = case
    found = (mask.dense(queries, keys) == 0).expand(2, 1, queries, keys)
    truth = [[[sees(mask, b, i, j) for j in range(keys)] for i in range(queries)] for b in range(2)]
    assert found[:, 0].tolist() == truth


@settings(deadline=None, max_examples=150)
@given(masks(), st.integers(1, 5))
def test_tiles_cover_every_visible_pair_once(case, block):
    mask, queries, keys = case
    whole, seen = mask.dense(queries, keys), torch.zeros(queries, keys)
    for rows, columns in mask.tiles(queries, keys, block):
        seen[rows, columns] += 1
    assert seen.max() <= 1
    assert (whole.masked_fill(seen.bool(), -torch.inf) == -torch.inf).all()


@settings(deadline=None, max_examples=100)
@given(masks(), st.randoms())
def test_rows_may_differ_by_batch_entry(case, random):
    mask, queries, keys = case
    rows = torch.tensor([[random.randrange(queries) for _ in range(3)] for _ in range(2)])
    whole = mask.dense(queries, keys).expand(2, 1, queries, keys)
    found = mask.tile(rows, 0, keys)
    found = torch.zeros(1, 1, 3, keys) if found is None else found
    assert torch.equal(found.expand(2, 1, 3, keys), whole.take_along_dim(rows[:, None, :, None], 2))


@settings(deadline=None, max_examples=100)
@given(masks())
def test_an_entry_is_a_slice_of_the_batch(case):
    mask, queries, keys = case
    whole = mask.dense(queries, keys).expand(2, 1, queries, keys)
    for b in range(2):
        assert torch.equal(mask.entry(b).dense(queries, keys).expand(1, 1, queries, keys), whole[b : b + 1])


@pytest.mark.parametrize("shape", [(1, 4, 9, 12), (2, 1, 9, 12), (2, 4, 1, 12), (1, 1, 9, 1), (1, 4, 1, 1)])
@pytest.mark.parametrize("causal", [False, True])
def test_a_bias_of_any_broadcast_shape_is_added_to_what_is_visible(shape, causal):
    bias = torch.randn(shape)
    mask = Mask(bias=bias, causal=causal)
    mask.check(9, 12)
    hidden = torch.ones(9, 12, dtype=torch.bool).triu(1) if causal else torch.zeros(9, 12, dtype=torch.bool)
    truth = bias.expand(*shape[:2], 9, 12).masked_fill(hidden, -torch.inf)
    assert torch.equal(mask.dense(9, 12), truth)
    rows = torch.tensor([[4, 0], [8, 8]])
    tile = mask.tile(rows, 2, 12)
    assert torch.equal(tile.expand(2, 4, 2, 10), truth.expand(2, 4, 9, 12).take_along_dim(rows[:, None, :, None], 2)[..., 2:])


def test_left_padding_does_not_hide_the_sinks():
    real = torch.tensor([[False] * 8 + [True] * 4])
    mask = Mask(keys=real, window=1, sinks=2)
    assert (mask.dense(12, 12)[0, 0, 0] == 0).nonzero().flatten().tolist() == [8, 9]
    assert mask.reach(0, 2, 12) == (0, 12)


def test_demands_name_the_rules_in_use():
    assert Mask().demands == frozenset()
    assert Mask(offset=3).demands == frozenset()
    assert Mask(causal=True, window=3, sinks=1).demands == {"causal", "window", "sinks"}
    assert Mask(keys=torch.zeros(1, 3, dtype=torch.bool), rule=Rule(dense.same_parity)).demands == {"keys", "rule"}


def test_real_queries_are_those_of_their_own_keys():
    keys = torch.tensor([[True, True, False], [False, True, True]])
    assert torch.equal(Mask(keys=keys).real(3), keys)
    assert torch.equal(Mask(keys=keys, offset=2).real(1), keys[:, 2:])
    assert Mask(causal=True).real(3) is None


def test_to_moves_every_tensor():
    mask = Mask(keys=dense.padding(4), segments=dense.segments(4), bias=dense.biased(4, 4), causal=True).to("meta")
    assert {mask.keys.device.type, mask.segments.device.type, mask.bias.device.type} == {"meta"}
    assert mask.causal


@pytest.mark.parametrize(
    "wrong, words",
    [
        ({"window": 0}, "at least 1"),
        ({"sinks": -1}, "0 or more"),
        ({"sinks": 2}, "give a window too"),
        ({"keys": torch.zeros(2, 3)}, "boolean"),
        ({"keys": torch.zeros(3, dtype=torch.bool)}, "boolean"),
        ({"segments": torch.zeros(3)}, "text numbers"),
        ({"bias": torch.zeros(3, 3)}, "bias must be"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(wrong, words):
    with pytest.raises(ValueError, match=words):
        Mask(**wrong)


@pytest.mark.parametrize(
    "mask, words",
    [
        (Mask(keys=dense.padding(5)), "one entry per key"),
        (Mask(segments=dense.segments(5)), "one entry per key"),
        (Mask(segments=dense.segments(6), offset=3), "queries reach to 7"),
        (Mask(bias=dense.biased(4, 5)), "mask.bias has shape"),
        (Mask(bias=dense.biased(3, 6)), "mask.bias has shape"),
    ],
)
def test_a_mask_of_another_length_is_refused(mask, words):
    with pytest.raises(ValueError, match=words):
        mask.check(4, 6)
