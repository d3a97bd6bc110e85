"""Local is exact attention under a narrower mask, whatever the mask was before; here beside its dense matrix."""

from dataclasses import replace

import pytest
import torch

from heedful.attention import Mask, Rule
from heedful.mechanisms import Local, Softmax
from heedful.mechanisms.local import narrowed
from heedful.ops import plain


def real(length, left):
    """Three texts: one whole, one short, one of three tokens."""
    rows = torch.arange(length) < torch.tensor([[length], [length - length // 3], [3]])
    return rows.flip(-1) if left else rows


def tensors(length, key_heads=2, batch=3):
    q = torch.randn(batch, 4, length, 8)
    return q, torch.randn(batch, key_heads, length, 8), torch.randn(batch, key_heads, length, 6)


def dense(q, k, v, mask):
    k, v = (t.double().repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
    hidden = mask.dense(q.shape[-2], k.shape[-2]) == -torch.inf
    logits = (q.double() @ k.mT / q.shape[-1] ** 0.5).masked_fill(hidden, -1e4)
    return logits.softmax(-1).masked_fill(hidden, 0) @ v


def both(length, mask, window, sinks):
    """Which pairs both the mask and the local rule show, spelled out."""
    first = torch.ones(1, length, dtype=torch.bool) if mask.keys is None else mask.keys
    sink = (first.cumsum(-1) <= sinks)[:, None, None]
    place = torch.arange(length)
    near = (place[:, None] - place).abs() < window
    return Mask(bias=mask.dense(length, length).masked_fill(~(near | sink), -torch.inf))


GIVEN = {
    "no mask": lambda n: Mask(),
    "causal": lambda n: Mask(causal=True),
    "padding right": lambda n: Mask(keys=real(n, False)),
    "causal padding left": lambda n: Mask(causal=True, keys=real(n, True)),
    "padding left": lambda n: Mask(keys=real(n, True)),
    "narrower window": lambda n: Mask(causal=True, window=5),
    "narrower window, more sinks": lambda n: Mask(causal=True, window=5, sinks=7, keys=real(n, True)),
    "wider window": lambda n: Mask(window=30),
    "wider window, fewer sinks": lambda n: Mask(window=30, sinks=1, keys=real(n, False)),
    "packed texts": lambda n: Mask(causal=True, segments=torch.arange(n).expand(3, -1) // 23),
    "packed and padded": lambda n: Mask(segments=torch.arange(n).expand(3, -1) // 40, keys=real(n, True)),
    "rule": lambda n: Mask(causal=True, rule=Rule(lambda batch, head, query, key: (query - key) % 3 != 1)),
    "rule and more sinks": lambda n: Mask(window=5, sinks=9, rule=Rule(lambda b, h, query, key: (query - key) % 3 != 1)),
}


@pytest.mark.parametrize("window, sinks", [(13, 0), (13, 3), (1, 0), (400, 2), (40, 40)])
@pytest.mark.parametrize("length", [20, 131, 320])
@pytest.mark.parametrize("given", GIVEN)
def test_it_equals_dense_attention_under_both_rules(given, length, window, sinks):
    mask, (q, k, v) = GIVEN[given](length), tensors(length)
    q, k, v = (t.requires_grad_() for t in (q, k, v))
    found, wanted = Local(window, sinks)(q, k, v, mask), dense(q, k, v, both(length, mask, window, sinks))
    assert torch.allclose(found.double(), wanted, atol=1e-5)
    weights = torch.randn(found.shape)
    for one, other in zip(
        torch.autograd.grad((found * weights).sum(), (q, k, v)),
        torch.autograd.grad((wanted * weights).sum(), (q, k, v)),
        strict=True,
    ):
        assert torch.allclose(one, other.float(), atol=2e-5)


@pytest.mark.parametrize("sinks", [0, 3])
@pytest.mark.parametrize("queries, keys, offset", [(200, 300, 100), (200, 260, 30), (300, 150, 0), (256, 200, -40), (200, 40, 160)])
def test_queries_may_stand_anywhere_beside_the_keys(queries, keys, offset, sinks):
    (q, _, _), (_, k, v) = tensors(queries), tensors(keys)
    for causal in (False, True):
        mask = Mask(causal=causal, offset=offset)
        wanted = dense(q, k, v, replace(mask, window=25, sinks=sinks))
        assert torch.allclose(Local(25, sinks)(q, k, v, mask).double(), wanted, atol=1e-5)


@pytest.mark.parametrize(
    "extra", [{"cap": 3.0}, {"null": torch.tensor([0.0, 1.0, -1.0, 2.0])}, {"cap": 3.0, "null": torch.zeros(4)}]
)
def test_soft_caps_and_null_logits_stay_those_of_softmax(extra):
    q, k, v = tensors(300)
    mask = Mask(causal=True, keys=real(300, True))
    found = Local(20, 2)(q, k, v, mask, **extra)
    with plain():
        wanted = Softmax()(q.double(), k.double(), v.double(), replace(mask, window=20, sinks=2), **extra)
    assert torch.allclose(found.double(), wanted, atol=1e-5)


def test_a_window_over_everything_is_softmax_itself():
    q, k, v = tensors(50)
    assert torch.equal(Local(50)(q, k, v, Mask(causal=True)), Softmax()(q, k, v, Mask(causal=True)))


def test_narrowing_twice_is_narrowing_once_where_one_rule_holds_the_other():
    assert narrowed(Mask(window=9, sinks=1), 12, 2).sinks == 1
    assert narrowed(Mask(window=9, sinks=1), 12, 2).rule is None
    assert narrowed(Mask(window=9, sinks=3), 12, 2).rule is not None


def test_the_state_holds_the_window_and_the_sinks_and_grows_no_more():
    q, k, v = tensors(120)
    local, state, sizes = Local(10, 3), None, []
    for i in range(120):
        _, state = local.decode(*(t[:, :, i : i + 1] for t in (q, k, v)), state)
        sizes.append(state.k.shape[-2])
    assert sizes[:12] == [4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 13, 13]
    assert max(sizes) == 13
    assert state.k.untyped_storage().nbytes() == state.k.numel() * 4


@pytest.mark.parametrize("pieces", [(1,) * 60, (150, 30, 1, 1, 140), (7, 160, 1, 1), (20, 20, 20)])
@pytest.mark.parametrize("window, sinks", [(1, 0), (1, 2), (9, 0), (9, 4), (300, 4)])
def test_a_state_remembers_sinks_behind_left_padding(pieces, window, sinks):
    length = sum(pieces)
    keys, (q, k, v), state, parts, start = real(length, True), tensors(length), None, [], 0
    keys[2] = False  # one text never begins
    for size in pieces:
        new = slice(start, start + size)
        out, state = Local(window, sinks).decode(q[:, :, new], k[:, :, new], v[:, :, new], state, keys[:, new])
        parts.append(out)
        start += size
    wanted = dense(q, k, v, Mask(causal=True, window=window, sinks=sinks, keys=keys))
    assert torch.allclose(torch.cat(parts, -2).double(), wanted, atol=1e-5)


@pytest.mark.parametrize("settings", [{"window": 0}, {"window": 2.5}, {"sinks": -1}])
def test_settings_that_mean_nothing_are_refused(settings):
    with pytest.raises(ValueError, match=f"{next(iter(settings))} is .* whole number"):
        Local(**settings)


def test_a_rule_of_each_text_goes_with_padding_of_all_and_the_other_way_round():
    q, k, v = tensors(40, batch=2)
    of_each = Rule(lambda batch, head, query, key: (query + key + batch) % 3 != 0, 2)
    of_all = Rule(lambda batch, head, query, key: torch.tensor([1])[batch] + query - key >= 0)
    for keys, rule in ((torch.arange(40)[None] < 33, of_each), (real(40, False)[:2], of_all)):
        mask = Mask(window=5, sinks=9, keys=keys, rule=rule)
        wanted = dense(q, k, v, both(40, mask, 30, 3))
        torch.testing.assert_close(Local(30, 3)(q, k, v, mask).double(), wanted, atol=3e-6, rtol=1e-5)
