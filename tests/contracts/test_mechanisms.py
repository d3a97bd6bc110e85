"""What every mechanism keeps: one law per test, over the whole list and every mask that a mechanism declares.

The truth is the mechanism's own plain formula in float64; that the formula is the right one is told in tests/mechanisms/.
Each failure that was measured in another library (a mask ignored, a leak, mean(v) for large norms ...) has its law here.
"""

import json
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch

from heedful.attention import DEMANDS, Mask, Rule, State, Unsupported
from heedful.mechanisms import ALL, Local, Softmax, Sparse, from_settings
from heedful.ops import plain

pytestmark = pytest.mark.filterwarnings("ignore:Performer")

SETTINGS = {
    "Performer": {"features": 48},
    "Softmax": {"beta": 1.5},
    "TopK": {"keys": 9},
    "FittedPerformer": {"features": 48},
    "Nystrom": {"landmarks": 16},
    "Linformer": {"keys": 16, "length": 96},
    "Reformer": {"rounds": 2, "chunk": 8},
    "Local": {"window": 12, "sinks": 2},
    "Landmarks": {"landmarks": 6, "chunk": 8, "sinks": 2},
    "Clustered": {"clusters": 8, "exact": 16, "window": 8, "sinks": 2, "group": 4},
}  # of those that do not take their defaults here
APART = {"Linear": 0.3}  # from mean(v), for long q and k: its weights grow with their size, not with its exponential
MIXING = ("Nystrom",)  # each query's answer depends on all queries
LOOKS_AHEAD = {"Sparse": {"stride": 8}}  # its stride is the root of the whole text's length, unless one is given as here
BATCH, HEADS, LENGTH, DIM, WIDTH = 2, 4, 70, 12, 10
REAL = torch.arange(LENGTH) < torch.tensor([[LENGTH], [LENGTH - 23]])  # the second text is shorter
LEFT = REAL.flip(-1)  # and here its padding comes first

MASKS = {
    "no mask": Mask(),
    "causal": Mask(causal=True),
    "padding": Mask(keys=REAL),
    "left padding": Mask(keys=LEFT),
    "causal padding": Mask(causal=True, keys=REAL),
    "causal left padding": Mask(causal=True, keys=LEFT),
    "window": Mask(window=9),
    "causal window": Mask(causal=True, window=9),
    "sinks": Mask(causal=True, window=9, sinks=2),
    "segments": Mask(causal=True, segments=torch.arange(LENGTH).expand(BATCH, -1) // 20),
    "bias": Mask(bias=torch.linspace(-2, 2, LENGTH).expand(1, HEADS, LENGTH, -1)),
    "rule": Mask(rule=Rule(lambda batch, head, query, key: (query + key) % 3 != 0)),
}
EXTRAS = {"cap": {"cap": 5.0}, "null": {"null": torch.zeros(HEADS)}}


def named(mechanisms):
    return [pytest.param(m, id=m.__name__) for m in mechanisms]


def supporting(*demands):
    return named(m for m in ALL if set(demands) <= m.supports)


every = pytest.mark.parametrize("kind", named(ALL))
every_masked = pytest.mark.parametrize(
    "kind, mask",
    [pytest.param(m, mask, id=f"{m.__name__}, {n}") for m in ALL for n, mask in MASKS.items() if mask.demands <= m.supports],
)


def build(kind, **settings):
    return kind(**{**SETTINGS.get(kind.__name__, {}), **settings})


def tensors(queries=LENGTH, keys=LENGTH, key_heads=HEADS, std=0.7, batch=BATCH):
    q = torch.randn(batch, HEADS, queries, DIM) * std
    k = torch.randn(batch, key_heads, keys, DIM) * std
    return q, k, torch.randn(batch, key_heads, keys, WIDTH)


def truth(mechanism, q, k, v, mask=None):
    with plain():
        return mechanism(q.double(), k.double(), v.double(), mask)


def off(found, wanted):
    """The relative distance."""
    found, wanted = found.detach(), wanted.detach()
    return float((found.double() - wanted.double()).norm() / wanted.double().norm().clamp_min(1e-30))


def gradients(attend, q, k, v):
    """Of a fixed random sum of the output; zero where an input has no way to it."""
    inputs = [t.detach().clone().requires_grad_() for t in (q, k, v)]
    out = attend(*inputs)
    torch.manual_seed(1)
    weights = torch.randn(out.shape).to(out)
    return torch.autograd.grad((out * weights).sum(), inputs, allow_unused=True, materialize_grads=True)


@every_masked
def test_a_call_equals_its_plain_formula_in_float64(kind, mask):
    mechanism, (q, k, v) = build(kind), tensors()
    assert off(mechanism(q, k, v, mask), truth(mechanism, q, k, v, mask)) < 1e-5


@every_masked
def test_gradients_equal_those_of_the_plain_formula(kind, mask):
    mechanism, (q, k, v) = build(kind), tensors()
    found = gradients(lambda q, k, v: mechanism(q, k, v, mask), q, k, v)
    wanted = gradients(lambda q, k, v: truth(mechanism, q, k, v, mask), q, k, v)
    for one, other in zip(found, wanted, strict=True):
        assert off(one, other) < 2e-5 or other.abs().max() == one.abs().max() == 0


def penalty_slope(mechanism, x, weight, mask):
    """The gradient that a penalty on the size of a gradient gives to the weight before the attention."""
    x = x.clone().requires_grad_()
    weight = weight.clone().requires_grad_()
    q, k, v = (x @ weight).unflatten(-1, (3, HEADS, DIM)).permute(2, 0, 3, 1, 4)
    slope = torch.autograd.grad(mechanism(q, k, v, mask).square().sum(), x, create_graph=True)[0]
    return torch.autograd.grad(slope.square().sum(), weight)[0]


@every_masked
def test_the_gradient_of_a_gradient_penalty_equals_that_of_the_plain_formula(kind, mask):
    mechanism, x, weight = build(kind), torch.randn(BATCH, LENGTH, DIM), torch.randn(DIM, 3 * HEADS * DIM) / DIM**0.5
    found = penalty_slope(mechanism, x, weight, mask)
    with plain():
        wanted = penalty_slope(mechanism, x.double(), weight.double(), mask)
    assert off(found, wanted) < 1e-4


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", supporting("causal"))
def test_one_tensor_for_all_three_keeps_its_second_derivative(kind, causal):
    mechanism, mask, slopes = build(kind), Mask(causal=causal), []
    for dtype in (torch.float32, torch.float64):
        x = torch.linspace(-2, 2, HEADS * 20 * DIM).sin().view(1, HEADS, 20, DIM).to(dtype).requires_grad_()
        out = mechanism(x, x, x, mask) if dtype == torch.float32 else truth(mechanism, x, x, x, mask)
        slope = torch.autograd.grad(out.square().sum(), x, create_graph=True)[0]
        slopes.append(torch.autograd.grad(slope.square().sum(), x)[0])
    assert off(*slopes) < 1e-4


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", supporting("keys", "causal"))
def test_a_batch_of_padding_alone_can_still_be_differentiated(kind, causal):
    mask = Mask(causal=causal, keys=torch.zeros_like(REAL))
    q, k, v = (t.requires_grad_() for t in tensors())
    build(kind)(q, k, v, mask).sum().backward()
    assert all(t.grad is None or (t.grad == 0).all() for t in (q, k, v))


@pytest.mark.parametrize("kind", supporting("causal", "cross"))
def test_queries_before_all_keys_get_zero_and_can_still_be_differentiated(kind):
    q, k, v = (t.requires_grad_() for t in tensors(5, 9))
    out = build(kind)(q, k, v, Mask(causal=True, offset=-9))
    assert (out == 0).all()
    out.sum().backward()
    assert all(t.grad is None or (t.grad == 0).all() for t in (q, k, v))


@pytest.mark.parametrize("keys", [None, LEFT[:, :60]], ids=["all real", "left padding"])
@pytest.mark.parametrize("kind", supporting("causal", "cross"))
def test_queries_before_the_first_key_change_nothing_for_those_after_it(kind, keys):
    mechanism, (q, k, v), early = build(kind), tensors(LENGTH, 60), LENGTH - 60
    out = mechanism(q, k, v, Mask(causal=True, offset=-early, keys=keys))
    assert (out[:, :, :early] == 0).all()
    assert off(out[:, :, early:], mechanism(q[:, :, early:], k, v, Mask(causal=True, keys=keys))) < 1e-5
    assert off(out, truth(mechanism, q, k, v, Mask(causal=True, offset=-early, keys=keys))) < 1e-5


@every
def test_the_gradient_of_torch_func_is_the_usual_one(kind):
    mechanism, (q, k, v) = build(kind), tensors()
    mechanism.prepare(HEADS, DIM)
    found = torch.func.grad(lambda v: mechanism(q, k, v).square().sum())(v)
    leaf = v.clone().requires_grad_()
    assert off(found, torch.autograd.grad(mechanism(q, k, leaf).square().sum(), leaf)[0]) < 1e-4


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", named([Softmax, Sparse, Local]))
def test_a_scale_below_zero_is_one_too(kind, causal):
    mechanism, (q, k, v) = build(kind), tensors()
    for scale in (-0.3, 0.0):
        with plain():
            wanted = mechanism(q.double(), k.double(), v.double(), Mask(causal=causal), scale)
        assert off(mechanism(q, k, v, Mask(causal=causal), scale), wanted) < 1e-5


@every_masked
def test_a_constant_value_comes_back(kind, mask):
    q, k, v = tensors()
    out = build(kind)(q, k, torch.ones_like(v), mask)
    assert torch.allclose(out, torch.ones_like(out) * (out != 0), atol=1e-5)
    if "keys" not in mask.demands:
        assert (out != 0).all()


@pytest.mark.parametrize("size", [0.7, 30.0])
@pytest.mark.parametrize("kind", supporting("causal"))
def test_future_tokens_leave_the_past_alone(kind, size):
    mechanism, (q, k, v) = build(kind), tensors(queries=150, keys=150)
    before = mechanism(q, k, v, Mask(causal=True))
    q[:, :, 100:], k[:, :, 100:], v[:, :, 100:] = (t[:, :, 100:] * size for t in tensors(150, 150))
    after = mechanism(q, k, v, Mask(causal=True))
    assert off(after[:, :, :100], before[:, :, :100]) < 1e-5


@pytest.mark.parametrize("kind", supporting("causal"))
def test_a_prefix_alone_gets_what_it_gets_in_the_whole(kind):
    mechanism, (q, k, v) = build(kind, **LOOKS_AHEAD.get(kind.__name__, {})), tensors()
    whole = mechanism(q, k, v, Mask(causal=True))
    for length in (1, 40):
        assert off(mechanism(*(t[:, :, :length] for t in (q, k, v)), Mask(causal=True)), whole[:, :, :length]) < 1e-5


@pytest.mark.parametrize("kind", supporting("causal"))
def test_no_gradient_flows_from_the_past_to_the_future(kind):
    for gradient in gradients(lambda q, k, v: build(kind)(q, k, v, Mask(causal=True))[:, :, :40], *tensors()):
        assert (gradient[:, :, 40:] == 0).all()


@pytest.mark.parametrize("kind", supporting("causal", "cross"))
def test_later_queries_alone_get_what_they_get_among_all(kind):
    mechanism, (q, k, v) = build(kind), tensors()
    whole = mechanism(q, k, v, Mask(causal=True))
    for start in (1, 40, LENGTH - 1):
        assert off(mechanism(q[:, :, start:], k, v, Mask(causal=True, offset=start)), whole[:, :, start:]) < 1e-5


@pytest.mark.parametrize("garbage", [0.0, 100.0, 1e30])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", supporting("keys", "causal"))
def test_padding_changes_nothing_whatever_lies_in_it(kind, causal, garbage):
    mechanism, (q, k, v), real = build(kind), tensors(), LENGTH - 23
    k[1, :, real:], v[1, :, real:] = garbage, garbage
    padded = mechanism(q, k, v, Mask(causal=causal, keys=REAL))[1:, :, :real]
    assert off(padded, mechanism(q[1:, :, :real], k[1:, :, :real], v[1:, :, :real], Mask(causal=causal))) < 1e-5


@pytest.mark.parametrize("kind", supporting("keys"))
def test_padding_may_be_told_once_for_all_texts(kind):
    mechanism, (q, k, v), once = build(kind), tensors(), LEFT[1:]
    for causal in (False, True) if "causal" in kind.supports else (False,):
        wanted = mechanism(q, k, v, Mask(causal, once.expand(BATCH, -1)))
        assert off(mechanism(q, k, v, Mask(causal, once)), wanted) < 1e-6
        with plain():
            assert off(mechanism(q, k, v, Mask(causal, once)), wanted) < 1e-5


@pytest.mark.parametrize("kind", supporting("keys"))
def test_padding_gets_no_gradient(kind):
    for gradient in gradients(lambda q, k, v: build(kind)(q, k, v, Mask(keys=REAL)), *tensors())[1:]:
        assert (gradient[1, :, LENGTH - 23 :] == 0).all()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", supporting("keys", "causal"))
def test_a_query_without_keys_gets_zero_and_gives_no_gradient(kind, causal):
    mask = Mask(causal=causal, keys=REAL & torch.tensor([[True], [False]]))
    q, k, v = tensors()
    assert (build(kind)(q, k, v, mask)[1] == 0).all()
    for gradient in gradients(lambda q, k, v: build(kind)(q, k, v, mask), q, k, v):
        assert torch.isfinite(gradient).all()
        assert (gradient[1] == 0).all()


@pytest.mark.parametrize("kind", supporting("keys", "causal"))
def test_queries_before_the_first_real_key_get_zero(kind):
    out = build(kind)(*tensors(), Mask(causal=True, keys=LEFT))
    assert (out[1, :, :23] == 0).all()
    assert (out[1, :, 23:] != 0).all()


@every_masked
def test_a_mask_is_not_ignored(kind, mask):
    mechanism, (q, k, v) = build(kind), tensors()
    if mask.demands:
        assert off(mechanism(q, k, v, mask), mechanism(q, k, v)) > 0.01


@every_masked
def test_the_rest_of_the_batch_changes_nothing(kind, mask):
    mechanism, (q, k, v) = build(kind), tensors()
    own = {name: t[1:] for name in ("keys", "segments") if (t := getattr(mask, name)) is not None}
    whole = mechanism(q, k, v, mask)
    assert off(mechanism(q[1:], k[1:], v[1:], replace(mask, **own)), whole[1:]) < 1e-5


@pytest.mark.parametrize("kind", supporting("keys"))
def test_one_padding_may_speak_for_all_texts(kind):
    mechanism, (q, k, v) = build(kind), tensors()
    one = REAL[1:]
    assert off(mechanism(q, k, v, Mask(keys=one)), mechanism(q, k, v, Mask(keys=one.expand(BATCH, -1)))) < 1e-5
    with pytest.raises(ValueError, match="3 texts but the call has 2"):
        mechanism(q, k, v, Mask(keys=REAL.new_ones(3, LENGTH)))


@pytest.mark.parametrize("kind", supporting("keys", "cross"))
def test_queries_of_another_text_are_not_silenced_by_the_keys_padding(kind):
    mechanism, (q, k, v) = build(kind), tensors()
    same_size = mechanism(q, k, v, Mask(keys=REAL, cross=True))
    longer = mechanism(torch.cat([q, q[:, :, :1]], 2), k, v, Mask(keys=REAL))[:, :, :LENGTH]
    assert (same_size != 0).all()
    if kind.__name__ not in MIXING:
        assert off(same_size, longer) < 1e-5


@pytest.mark.parametrize("kind", named(m for m in ALL if "keys" in m.supports and "cross" not in m.supports))
def test_another_text_of_the_same_length_is_refused_too(kind):
    with pytest.raises(Unsupported, match="keys of other tokens"):
        build(kind)(*tensors(), Mask(keys=REAL, cross=True))


@pytest.mark.parametrize("mask", [pytest.param(MASKS[n], id=n) for n in ("no mask", "causal")])
@every
def test_autocast_does_not_change_how_a_formula_is_computed(kind, mask):
    if not mask.demands <= kind.supports:
        return
    mechanism, given = build(kind), [t.bfloat16() for t in tensors()]

    def mixed(q, k, v):
        with torch.autocast("cpu", torch.bfloat16):
            return mechanism(q, k, v, mask)

    assert torch.equal(mixed(*given), mechanism(*given, mask))
    for one, other in zip(gradients(mixed, *given), gradients(lambda q, k, v: mechanism(q, k, v, mask), *given), strict=True):
        assert torch.equal(one, other)


@every
def test_what_is_made_in_inference_mode_can_be_trained_and_loaded(kind):
    mechanism, (q, k, v) = build(kind), tensors()
    with torch.inference_mode():
        mechanism(q, k, v)
    assert not any(t.is_inference() for t in mechanism.state_dict().values())
    gradients(mechanism, q, k, v)
    mechanism.load_state_dict(mechanism.state_dict())


@every
def test_nothing_comes_of_nothing(kind):
    for sizes in ((0, 5), (5, 0)):
        if sizes[0] == sizes[1] or "cross" in kind.supports:
            out = build(kind)(*(t.requires_grad_() for t in tensors(*sizes)))
            assert out.shape == (BATCH, HEADS, sizes[0], WIDTH)
            assert (out == 0).all()
            out.sum().backward()
    q, k, v = tensors()
    assert build(kind)(q[:0], k[:0], v[:0]).shape == (0, HEADS, LENGTH, WIDTH)


@every
def test_what_is_no_mask_is_refused(kind):
    with pytest.raises(TypeError, match=r"Mask\(causal=True\)"):
        build(kind)(*tensors(), torch.ones(LENGTH, LENGTH, dtype=torch.bool))
    with pytest.raises(TypeError, match="not dropout"):
        build(kind)(*tensors(), dropout=0.1)


@every
def test_other_heads_change_nothing(kind):
    mechanism, (q, k, v) = build(kind), tensors()
    before = mechanism(q, k, v)
    for t in (q, k, v):
        t[:, 1:] *= 5
    assert off(mechanism(q, k, v)[:, 0], before[:, 0]) < 1e-5


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("key_heads", [1, 2])
@pytest.mark.parametrize("kind", supporting("causal"))
def test_shared_key_heads_equal_spread_ones(kind, key_heads, causal):
    mechanism, (q, k, v) = build(kind), tensors(key_heads=key_heads)

    def spread(q, k, v):
        return mechanism(q, *(t.repeat_interleave(HEADS // key_heads, 1) for t in (k, v)), Mask(causal=causal))

    shared = [mechanism(q, k, v, Mask(causal=causal)), *gradients(lambda q, k, v: mechanism(q, k, v, Mask(causal=causal)), q, k, v)]
    for one, other in zip(shared, [spread(q, k, v), *gradients(spread, q, k, v)], strict=True):
        assert off(one, other) < 1e-5


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("length", [1, 2, 3, 64, 127, 301])
@pytest.mark.parametrize("kind", supporting("causal"))
def test_any_length_will_do(kind, length, causal):
    mechanism, (q, k, v) = build(kind), tensors(length, length, batch=1)
    assert off(mechanism(q, k, v, Mask(causal=causal)), truth(mechanism, q, k, v, Mask(causal=causal))) < 1e-5


@pytest.mark.parametrize("kind", supporting("cross"))
def test_queries_and_keys_may_differ_in_number(kind):
    for queries, keys in ((1, LENGTH), (LENGTH, 1), (33, 90), (90, 33)):
        mechanism, (q, k, v) = build(kind), tensors(queries, keys)
        assert off(mechanism(q, k, v), truth(mechanism, q, k, v)) < 1e-5


@pytest.mark.parametrize("dtype, near", [(torch.float32, 1e-5), (torch.float16, 3e-3), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("mask", [pytest.param(MASKS[n], id=n) for n in ("no mask", "padding", "causal")])
@pytest.mark.parametrize("kind", supporting("causal", "keys"))
def test_low_precision_stays_finite_and_close(kind, mask, dtype, near):
    mechanism, (q, k, v) = build(kind), (t.to(dtype) for t in tensors(std=1.5))
    out = mechanism(q, k, v, mask)
    assert out.dtype == dtype
    assert off(out, truth(mechanism, q, k, v, mask)) < near
    found = gradients(lambda q, k, v: mechanism(q, k, v, mask), q, k, v)
    wanted = gradients(lambda q, k, v: truth(mechanism, q, k, v, mask), q, k, v)
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == dtype
        assert off(one, other) < 3 * near or one.abs().max() == other.abs().max() == 0


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", supporting("causal"))
def test_long_queries_and_keys_do_not_turn_attention_into_a_mean(kind, causal):
    mechanism, (q, k, v) = build(kind), tensors(std=8.0)
    out = mechanism(q, k, v, Mask(causal=causal))
    assert off(out, truth(mechanism, q, k, v, Mask(causal=causal))) < 1e-5
    mean = v.cumsum(-2) / torch.arange(1, LENGTH + 1)[:, None] if causal else v.mean(-2, keepdim=True).expand_as(out)
    assert off(out, mean) > APART.get(kind.__name__, 0.5)


PIECES = ((1,) * 9, (13, 1, 1, 40, 15), (64, 1, 5), (LENGTH,))


@pytest.mark.parametrize("left", [False, True], ids=["all real", "left padding"])
@pytest.mark.parametrize("pieces", PIECES, ids=str)
@pytest.mark.parametrize("kind", supporting("state"))
def test_reading_on_from_a_state_equals_one_causal_call(kind, pieces, left):
    mechanism, (q, k, v), length = build(kind), tensors(std=1.5), sum(pieces)
    real = LEFT[:, -length:] if left else None
    q, k, v = (t[:, :, -length:] for t in (q, k, v))
    state, parts, start = None, [], 0
    for size in pieces:
        new = slice(start, start + size)
        keys = None if real is None else real[:, new]
        out, state = mechanism.decode(q[:, :, new], k[:, :, new], v[:, :, new], state, keys)
        parts.append(out)
        start += size
    assert off(torch.cat(parts, -2), mechanism(q, k, v, Mask(causal=True, keys=real))) < 1e-5


@pytest.mark.parametrize("kind", supporting("state"))
def test_a_state_follows_its_batch_entries(kind):
    mechanism, (q, k, v) = build(kind), tensors()
    _, state = mechanism.decode(*(t[:, :, :40] for t in (q, k, v)))
    turned = torch.tensor([1, 0, 1])
    out, _ = mechanism.decode(*(t[turned, :, 40:] for t in (q, k, v)), state.select(turned))
    assert off(out, mechanism(q, k, v, Mask(causal=True))[turned, :, 40:]) < 1e-5
    assert state.repeat(2).bytes == 2 * state.bytes > 0


def memory(state):
    """The bytes that a state keeps from being freed, parts of parts included."""
    values = [getattr(state, f.name) for f in fields(state)]
    parts = [x for value in values for x in (value if isinstance(value, tuple) else (value,))]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in parts if isinstance(t, torch.Tensor)}
    return sum(storages.values()) + sum(memory(x) for x in parts if isinstance(x, State))


@pytest.mark.parametrize("padding", [False, True])
@pytest.mark.parametrize("kind", supporting("state"))
def test_a_state_holds_no_more_memory_than_it_says(kind, padding):
    mechanism, (q, k, v) = build(kind), tensors(2049, 2049)
    keys = torch.arange(2049).expand(BATCH, -1) >= 5 if padding else None
    state = None
    for new in (slice(0, 2048), slice(2048, 2049)):
        _, state = mechanism.decode(q[:, :, new], k[:, :, new], v[:, :, new], state, None if keys is None else keys[:, new])
        assert memory(state) <= 1.5 * state.bytes + 1024


@every_masked
def test_inputs_stay_as_they_were(kind, mask):
    q, k, v = tensors()
    before = [t.clone() for t in (q, k, v)]
    gradients(lambda q, k, v: build(kind)(q, k, v, mask), q, k, v)
    build(kind)(q, k, v, mask)
    assert all(torch.equal(one, other) for one, other in zip((q, k, v), before, strict=True))


@every
def test_any_strides_will_do(kind):
    mechanism, (q, k, v) = build(kind), tensors()
    moved = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v)]
    assert off(mechanism(*moved), mechanism(q, k, v)) < 1e-5


@every
def test_two_equal_mechanisms_give_one_answer_with_gradients_and_without(kind):
    q, k, v = tensors()
    first = build(kind)(q, k, v)
    with torch.inference_mode():
        assert torch.equal(build(kind)(q, k, v), first)
    assert torch.equal(build(kind)(q.requires_grad_(), k, v).detach(), first)


@every
def test_settings_make_the_trip_through_json(kind):
    mechanism, (q, k, v) = build(kind), tensors()
    again = from_settings(kind.__name__, json.loads(json.dumps(mechanism.settings)))
    assert repr(again) == repr(mechanism)
    assert torch.equal(again(q, k, v), mechanism(q, k, v))


@every
def test_a_saved_state_loads_into_a_fresh_mechanism(kind):
    mechanism, (q, k, v) = build(kind), tensors()
    mechanism.prepare(HEADS, DIM)
    for tensor in mechanism.state_dict().values():
        tensor.mul_(1.1)  # what is loaded counts, not what the settings would make
    wanted, fresh = mechanism(q, k, v), build(kind)
    fresh.load_state_dict(mechanism.state_dict())
    assert torch.equal(fresh(q, k, v), wanted)


@every
def test_preparing_twice_changes_nothing(kind):
    mechanism = build(kind)
    mechanism.prepare(HEADS, DIM)
    before = {name: t.clone() for name, t in mechanism.state_dict().items()}
    mechanism.prepare(HEADS, DIM)
    assert mechanism.state_dict().keys() == before.keys()
    assert all(torch.equal(t, before[name]) for name, t in mechanism.state_dict().items())


@pytest.mark.parametrize(
    "kind, demand", [pytest.param(m, d, id=f"{m.__name__}, {d}") for m in ALL for d in DEMANDS if d not in m.supports]
)
def test_what_is_not_declared_is_refused_with_the_alternative(kind, demand):
    q, k, v = tensors(keys=LENGTH + 1 if demand == "cross" else LENGTH)
    if demand == "state":
        with pytest.raises(Unsupported, match=r"use (Local|Softmax)\("):
            build(kind).decode(q, k, v)
        return
    masks = [m for m in MASKS.values() if demand in m.demands]
    with pytest.raises(Unsupported) as refusal:
        build(kind)(q, k, v, masks[0] if masks else None, **EXTRAS.get(demand, {}))
    assert DEMANDS[demand] in str(refusal.value)
    named = [m for m in ALL if f"use {m.__name__}(" in str(refusal.value)]
    assert named
    assert all(demand in m.supports for m in named)


@every
def test_each_demand_has_a_mask_here(kind):
    assert kind.supports <= DEMANDS.keys() | {"shared"}
    assert set(DEMANDS) <= {d for m in MASKS.values() for d in m.demands} | EXTRAS.keys() | {"cross", "state"}


@every
def test_each_mechanism_has_a_file_and_a_test_of_its_own(kind):
    name = kind.__module__.rsplit(".", 1)[-1]
    assert (Path(__file__).parents[1] / "mechanisms" / f"test_{name}.py").exists()


def test_an_unknown_name_is_answered_with_the_known_ones():
    with pytest.raises(ValueError, match="Softmax, Hard"):
        from_settings("Softmx")
