"""Reformer: buckets found and sorted by plain loops, then one dense float64 softmax over what they put in reach, are the truth."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from heedful.attention import Mask, Unsupported
from heedful.mechanisms import Reformer, Softmax
from heedful.ops import ranges as module
from heedful.ops.ranges import Ranges, attend_ranges

REAL = torch.arange(60) < torch.tensor([[60], [37]])
SHUFFLED = torch.stack([REAL[0], REAL[1, torch.randperm(60, generator=torch.Generator().manual_seed(3))]])
MASKS = {
    "none": Mask(),
    "causal": Mask(causal=True),
    "padding": Mask(keys=REAL),
    "causal left padding": Mask(causal=True, keys=REAL.flip(-1)),
    "padding between": Mask(keys=SHUFFLED),
    "causal padding between": Mask(causal=True, keys=SHUFFLED),
}
masks = pytest.mark.parametrize("mask", [pytest.param(m, id=n) for n, m in MASKS.items()])
both = pytest.mark.parametrize("causal", [False, True])


def tensors(queries=60, keys=60, std=1.5, batch=2):
    return [torch.randn(batch, 3, tokens, 8) * s for tokens, s in ((queries, std), (keys, std), (keys, 1))]


def off(found, wanted):
    return float((found.double() - wanted.double()).norm().detach() / wanted.double().norm().detach().clamp_min(1e-30))


def run(attend, *inputs):
    """The output and the gradients of a fixed random sum of it."""
    inputs = [t.detach().clone().requires_grad_() for t in inputs]
    out = attend(*inputs)
    torch.manual_seed(1)
    return out, *torch.autograd.grad((out * torch.randn(out.shape)).sum(), inputs)


def bucket(x, directions, bits):
    """argmax of [xR; -xR], six bits a rotation; directions are (dim, rotations, 32)."""
    number = 0
    for start in range(0, bits, 6):
        size = 2 ** min(6, bits - start)
        along = x @ directions[:, start // 6, : size // 2]
        number = number * size + int(torch.cat([along, -along]).argmax())
    return number


def reach_of(asked, kept, causal, chunk, offset):
    """For each query's bucket the keys it sees; `kept` names the bucket of each real key."""
    order = sorted(kept, key=lambda j: (kept[j], j))
    found = []
    for i, own in enumerate(asked):
        before = [j for j in order if (kept[j], j) <= (own, i + offset)]
        if causal:
            found.append([j for j in before if kept[j] == own][-chunk:])
        else:
            home = max(0, min(len(before), len(order)) - 1) // chunk
            found.append(order[max(0, home - 1) * chunk : (home + 2) * chunk])
    return found


def reach(mechanism, q, k, mask):
    """(batch, heads, queries, keys): whether a pair is in reach in the window or some round."""
    seen = torch.zeros(*q.shape[:3], k.shape[-2], dtype=torch.bool)
    for b, h in torch.cartesian_prod(torch.arange(q.shape[0]), torch.arange(q.shape[1])).tolist():
        keys = [j for j in range(k.shape[-2]) if mask.keys is None or mask.keys[b, j]]
        ends = [i + mask.offset if mask.causal else k.shape[-2] for i in range(q.shape[-2])]
        bits = [next(n for n in range(30) if mechanism.chunk * 2**n >= sum(j <= end for j in keys)) for end in ends]
        if mechanism.buckets is not None:
            bits = [mechanism.buckets.bit_length() - 1] * len(bits)
        for level in set(bits):
            rounds = [([0] * q.shape[-2], dict.fromkeys(keys, 0), mechanism.window)]
            for r in range(mechanism.rounds):
                directions = mechanism._directions[:, :, r]
                source = k if mechanism.hashed == "both" else q
                asked = [bucket(x, directions, level) for x in q[b, h]]
                rounds.append((asked, {j: bucket(source[b, h, j], directions, level) for j in keys}, mechanism.chunk))
            for asked, kept, chunk in rounds:
                for i, own in enumerate(reach_of(asked, kept, mask.causal, chunk, mask.offset)):
                    seen[b, h, i, own] |= bits[i] == level
    return seen


def dense(q, k, v, seen, scale=8**-0.5):
    logits = (q.double() @ k.double().mT * scale).masked_fill(~seen, -torch.inf)
    blind = ~seen.any(-1, keepdim=True)
    return logits.masked_fill(blind, 0).softmax(-1).masked_fill(blind, 0) @ v.double()


@masks
@pytest.mark.parametrize(
    "settings", [{}, {"hashed": "queries"}, {"window": 6, "rounds": 1}, {"chunk": 3}, {"buckets": 128}], ids=str
)
def test_it_equals_dense_attention_over_what_is_in_reach(settings, mask):
    mechanism, (q, k, v) = Reformer(**{"rounds": 3, "chunk": 5, "window": 1, **settings}), tensors()
    mechanism.prepare(3, 8)
    seen = reach(mechanism, q, k, mask)
    assert 0.02 < seen.double().mean() < 0.9
    found = run(lambda *qkv: mechanism(*qkv, mask), q, k, v)
    for one, other in zip(found, run(lambda *qkv: dense(*qkv, seen), q, k, v), strict=True):
        assert off(one, other) < 1e-5


@pytest.mark.parametrize("mask", [Mask(), Mask(causal=True, offset=20)], ids=["none", "causal"])
@pytest.mark.parametrize("queries, keys", [(40, 60), (60, 33), (1, 60), (60, 1)])
def test_queries_may_be_others_than_the_keys(queries, keys, mask):
    mechanism, (q, k, v) = Reformer(rounds=2, chunk=4, window=2), tensors(queries, keys)
    mechanism.prepare(3, 8)
    assert off(mechanism(q, k, v, mask), dense(q, k, v, reach(mechanism, q, k, mask))) < 1e-5


def test_a_pair_seen_in_several_rounds_counts_once(monkeypatch):
    q, k, v = tensors()
    once, thrice = Reformer(rounds=1, chunk=8), Reformer(rounds=3, chunk=8)
    once.prepare(3, 8)
    thrice.prepare(3, 8)
    thrice._directions = once._directions.expand(-1, -1, 3, -1)
    for mask in MASKS.values():
        assert off(thrice(q, k, v, mask), once(q, k, v, mask)) < 1e-6


@both
def test_more_rounds_come_closer_to_softmax(causal):
    q, k, v = tensors(400, 400, batch=1)
    mask = Mask(causal=causal)
    errors = [off(Reformer(rounds, 16)(q, k, v, mask), Softmax()(q, k, v, mask)) for rounds in (1, 4, 16)]
    assert errors[0] > 1.3 * errors[1] > 1.3 * 1.3 * errors[2]


@both
def test_queries_find_the_keys_that_point_their_way(causal):
    """Of 500 keys each query's own copy is 40 times as likely as all others together: hashing finds it, a window does not."""
    k, v = torch.randn(2, 1, 2, 500, 16)
    there = torch.arange(500) // 2 if causal else torch.randperm(500)
    q = 3 * k[:, :, there]
    found = Reformer(rounds=2, chunk=16, window=1)(q, k, v, Mask(causal=causal))
    assert off(found, Softmax()(q, k, v, Mask(causal=causal))) < 0.35


@both
def test_few_enough_tokens_are_attended_exactly(causal):
    q, k, v = tensors(32, 32)
    assert off(Reformer(chunk=32)(q, k, v, Mask(causal=causal)), Softmax()(q, k, v, Mask(causal=causal))) < 1e-5


def test_no_real_query_is_left_without_a_key():
    for mask in MASKS.values():
        q, k, v = tensors()
        out = Reformer(rounds=1, chunk=1, window=1)(q, k, v.abs() + 1, mask)
        real = torch.ones(2, 60, dtype=torch.bool) if mask.keys is None else mask.keys
        assert (out.movedim(1, 2)[real] >= 1 - 1e-5).all()


@both
@pytest.mark.parametrize("garbage", [0.0, 1e30, torch.nan])
@pytest.mark.parametrize("real", [REAL, REAL.flip(-1), SHUFFLED], ids=["right", "left", "between"])
def test_each_text_is_attended_as_if_it_were_alone_and_had_no_padding(real, garbage, causal):
    mechanism, inputs = Reformer(rounds=2, chunk=4, window=3), tensors()
    for t in inputs[1:]:
        t.masked_fill_(~real[:, None, :, None], garbage)

    def alone(q, k, v):
        found = torch.zeros_like(q)
        for i, own in enumerate(real):
            found[i : i + 1, :, own] = mechanism(*(t[i : i + 1, :, own] for t in (q, k, v)), Mask(causal=causal))
        return found

    def padded(q, k, v):
        return mechanism(q, k, v, Mask(causal=causal, keys=real)) * real[:, None, :, None]

    for one, other in zip(run(padded, *inputs), run(alone, *inputs), strict=True):
        assert off(one, other) < 1e-5


@pytest.mark.parametrize("settings", [{}, {"chunk": 4}, {"chunk": 4, "buckets": 16}, {"chunk": 4, "hashed": "queries"}], ids=str)
def test_later_tokens_need_not_even_be_there(settings):
    inputs, mask = tensors(300, 300), Mask(causal=True)
    whole = Reformer(**settings)(*inputs, mask)
    for length in (3, 35, 128, 129):
        alone = Reformer(**settings)(*(t[:, :, :length] for t in inputs), mask)
        assert off(alone, whole[:, :, :length]) < 1e-6


def test_a_negative_scale_looks_for_the_opposite_keys():
    q, k, v = tensors()
    mechanism = Reformer(rounds=1, chunk=4, window=1)
    assert off(mechanism(q, k, v, scale=-0.5), mechanism(-q, k, v, scale=0.5)) < 1e-6


@both
@pytest.mark.parametrize("rows, step", [(1, 1), (3, 100), (64, 2**20)])
def test_tiles_of_any_size_give_one_answer(rows, step, causal, monkeypatch):
    inputs, mechanism = tensors(), Reformer(rounds=2, chunk=5, window=3)
    wanted = run(lambda *qkv: mechanism(*qkv, Mask(causal=causal)), *inputs)
    monkeypatch.setattr(module, "ROWS", rows)
    monkeypatch.setattr(module, "STEP", step)
    for one, other in zip(run(lambda *qkv: mechanism(*qkv, Mask(causal=causal)), *inputs), wanted, strict=True):
        assert off(one, other) < 1e-5


@both
def test_gradients_pass_gradcheck_and_so_do_second_ones(causal):
    q, k, v = (torch.randn(1, 1, 7, 2, dtype=torch.float64, requires_grad=True) for _ in range(3))
    mask = Mask(causal=causal, keys=torch.arange(7)[None] < 6)
    mechanism = Reformer(rounds=2, chunk=2, window=1)
    assert torch.autograd.gradcheck(lambda *qkv: mechanism(*qkv, mask), (q, k, v))
    assert torch.autograd.gradgradcheck(lambda *qkv: mechanism(*qkv, mask), (q, k, v))


@both
def test_torch_func_transforms_pass_through(causal):
    q, k, v = tensors(batch=1)
    mechanism = Reformer(rounds=2, chunk=5)
    found = torch.func.grad(lambda q: mechanism(q, k, v, Mask(causal=causal)).square().sum())(q)
    q.requires_grad_()
    (wanted,) = torch.autograd.grad(mechanism(q, k, v, Mask(causal=causal)).square().sum(), q)
    assert off(found, wanted) < 1e-5


def test_its_rotations_depend_on_the_seed_alone():
    q, k, v = tensors()
    first = Reformer(chunk=4, seed=3)(q, k, v)
    torch.manual_seed(7)
    before = torch.get_rng_state()
    assert torch.equal(Reformer(chunk=4, seed=3)(q, k, v), first)
    assert torch.equal(torch.get_rng_state(), before)
    assert off(Reformer(chunk=4, seed=4)(q, k, v), first) > 0.01


def test_a_resized_head_gets_new_rotations():
    mechanism = Reformer()
    mechanism.prepare(3, 8)
    mechanism.prepare(3, 6)
    assert mechanism._directions.shape[0] == 6


class Largest(TorchDispatchMode):
    """The size of the largest tensor that any operation made."""

    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        found = [t.numel() for t in torch.utils._pytree.tree_leaves(out) if isinstance(t, torch.Tensor) and not t._is_view()]
        self.numbers = max([self.numbers, *found])
        return out


@both
def test_no_tensor_grows_with_the_square_of_the_tokens(causal):
    sizes = []
    for tokens in (2048, 8192):
        inputs = torch.randn(3, 1, 1, tokens, 8)
        with Largest() as seen:
            run(lambda *qkv: Reformer(rounds=2, chunk=16)(*qkv, Mask(causal=causal)), *inputs)
        sizes.append(seen.numbers)
    assert sizes[0] <= max(module.STEP, 2048 * 200)
    assert sizes[1] <= 4.5 * max(module.STEP, 2048 * 200)


def test_ranges_in_many_orders_equal_the_matrix_of_pairs():
    """attend_ranges by itself, with ranges that have nothing to do with buckets."""
    q, k, v = torch.randn(3, 2, 33, 8).unbind()
    orders = [torch.stack([torch.randperm(33) for _ in range(2)]) for _ in range(3)]
    home = torch.randint(0, 5, (2, 33))
    low = (home * 8 - 3).clamp_min(0)
    high = torch.minimum(low + torch.randint(0, 12, (2, 33)), torch.tensor(33))
    rounds = [Ranges(order, low, high) for order in orders]
    entries, places = torch.arange(2)[:, None, None], torch.arange(33)
    seen = torch.stack([r.sees(entries, places[:, None], places) for r in rounds]).any(0)
    found = run(lambda *qkv: attend_ranges(*qkv, rounds, 0.3), q, k, v)
    for one, other in zip(found, run(lambda *qkv: dense(*qkv, seen, 0.3), q, k, v), strict=True):
        assert off(one, other) < 1e-5


def test_keys_by_queries_need_the_queries():
    q, k, v = tensors(40, 60)
    with pytest.raises(Unsupported, match="use hashed='both'"):
        Reformer(hashed="queries")(q, k, v)


@pytest.mark.parametrize(
    "settings, needed",
    [
        ({"rounds": 0}, "rounds is 0; it must be a whole number of at least 1"),
        ({"chunk": 1.5}, r"chunk is 1\.5; it must be"),
        ({"window": 0}, "window is 0; it must be"),
        ({"buckets": -4}, "buckets is -4; it must be a power of two"),
        ({"buckets": 12}, "buckets is 12; it must be a power of two"),
        ({"hashed": "keys"}, "hashed is 'keys'; it must be one of both, queries"),
        ({"seed": "a"}, "seed is 'a'; it must be a whole number"),
    ],
    ids=str,
)
def test_bad_settings_are_refused_at_once(settings, needed):
    with pytest.raises(ValueError, match=needed):
        Reformer(**settings)
