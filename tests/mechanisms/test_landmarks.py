"""Landmarks give what their formula says, spelled out over dense matrices; where nothing is lost they are exact."""

import pytest
import torch

from heedful.attention import Mask
from heedful.mechanisms import Landmarks, Softmax
from heedful.mechanisms.landmarks import initial
from heedful.ops import plain
from heedful.ops.landmarks import Learned

SETTINGS = {"landmarks": 5, "chunk": 8, "sinks": 2}
RIGHT = torch.arange(45) < torch.tensor([[45], [30]])


def tensors(length=45, heads=2, dim=6, width=4, dtype=torch.float64):
    return [torch.randn(2, heads, length, d, dtype=dtype) for d in (dim, dim, width)]


def spelled_out(mechanism, q, k, v, mask, scale):
    """Token by token, from the definition."""
    learned, out = Learned(*(t.detach().double() for t in mechanism.learned)), torch.zeros(*q.shape[:3], v.shape[-1]).double()
    for b in range(q.shape[0]):
        real = [j for j in range(k.shape[2]) if mask.keys is None or mask.keys[b, j]]
        sinks = real[: mechanism.sinks]
        for h in range(q.shape[1]):
            x, y = q[b, h] * scale**0.5, k[b, h] * scale**0.5
            for i in range(q.shape[2]):
                gap = {j: i // mechanism.chunk - j // mechanism.chunk for j in real}
                seen = [j for j in real if not mask.causal or j <= i]
                close = [j for j in seen if j in sinks or abs(gap[j]) <= 1]
                logits, values = [x[i] @ y[j] for j in close], [v[b, h, j] for j in close]
                distant = [j for j in seen if j not in close]
                if distant:
                    keys, held = y[distant], v[b, h][distant]
                    shares = (keys @ learned.directions[h].mT + learned.levels[h]).softmax(-1)
                    count = shares.sum(0)
                    means, mean_keys = shares.mT @ held / count[:, None], shares.mT @ keys / count[:, None]
                    sights = learned.sights[h] + learned.pull[h] * mean_keys
                    logits += list(sights @ x[i] + count.log() + learned.weights[h])
                    values += list(means)
                if logits:
                    out[b, h, i] = torch.stack(logits).softmax(-1) @ torch.stack(values)
    return out


def trained(**settings):
    """With tensors that a fit might have left."""
    mechanism = Landmarks(**{**SETTINGS, **settings})
    mechanism.prepare(2, 6)
    mechanism.learn(Learned(*(t + 0.3 * torch.randn_like(t) for t in mechanism.learned)))
    return mechanism


@pytest.mark.parametrize("mask", [Mask(), Mask(causal=True), Mask(keys=RIGHT), Mask(causal=True, keys=RIGHT.flip(-1))], ids=str)
@pytest.mark.parametrize("sinks", [0, 2])
def test_the_output_is_the_formula_spelled_out(mask, sinks):
    mechanism, (q, k, v) = trained(sinks=sinks), tensors()
    wanted = spelled_out(mechanism, q, k, v, mask, 0.4)
    assert torch.allclose(mechanism(q, k, v, mask, 0.4), wanted, atol=1e-9)
    with plain():
        assert torch.allclose(mechanism(q, k, v, mask, 0.4), wanted, atol=1e-9)


@pytest.mark.parametrize("causal", [False, True])
def test_texts_of_few_chunks_are_exact(causal):
    q, k, v = tensors(length=16)
    mask = Mask(causal=causal)
    assert torch.allclose(trained()(q, k, v, mask), Softmax()(q, k, v, mask))


@pytest.mark.parametrize("causal", [False, True])
def test_every_key_counts_once(causal):
    q, k, v = tensors()
    mechanism, mask = Landmarks(**SETTINGS), Mask(causal=causal)  # before a fit log-weights are 0
    assert torch.allclose(mechanism(q * 0, k, v, mask), Softmax()(q * 0, k, v, mask))


@pytest.mark.parametrize("causal", [False, True])
def test_keys_that_stand_at_landmarks_lose_nothing(causal):
    q, _, v = tensors()
    points = torch.randn(2, 5, 6) * 30
    k = points[:, torch.randint(5, (45,))].double().expand(2, -1, -1, -1)
    mechanism, mask = Landmarks(**SETTINGS), Mask(causal=causal)
    mechanism.learn(initial(points))
    assert torch.allclose(mechanism(q, k, v, mask, 1.0), Softmax()(q, k, v, mask, 1.0))


def test_sinks_are_exact_however_far():
    q, k, v = tensors()
    k[:, :, 0] = 500 * q[:, :, -1]  # where the last query looks
    assert torch.allclose(Landmarks(**SETTINGS)(q, k, v, Mask(causal=True))[:, :, -1], v[:, :, 0])


def test_the_state_keeps_its_size():
    mechanism, sizes, state = Landmarks(**SETTINGS), [], None
    for length in (16, 160, 1600):
        _, state = mechanism.decode(*tensors(length), state)
        sizes.append(state.bytes)
    assert sizes[0] == sizes[1] == sizes[2]


def test_what_is_learned_trains_inside_a_host_and_half_inputs_keep_their_type():
    mechanism, (q, k, v) = Landmarks(**SETTINGS), tensors(dtype=torch.float16)
    out = mechanism(q, k, v, Mask(causal=True))
    assert out.dtype == torch.float16
    out.float().square().sum().backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() and p.grad.abs().sum() > 0 for p in mechanism.parameters())


def test_gradients_of_what_is_learned_are_those_of_finite_differences():
    mechanism, (q, k, v) = trained(), tensors(length=30)
    given = tuple(t.double().detach().requires_grad_() for t in mechanism.learned)

    def attend(*learned):
        mechanism._on = lambda q: Learned(*learned)
        return mechanism(q, k, v, Mask(causal=True))

    assert torch.autograd.gradcheck(attend, given, fast_mode=True)


def test_landmarks_are_drawn_from_their_seed_alone():
    torch.manual_seed(1)
    one = Landmarks(**SETTINGS)
    one.prepare(2, 6)
    torch.manual_seed(2)
    other, third = Landmarks(**SETTINGS), Landmarks(**SETTINGS, seed=1)
    other.prepare(2, 6)
    third.prepare(2, 6)
    assert torch.equal(one.directions, other.directions)
    assert not torch.equal(one.directions, third.directions)


@pytest.mark.parametrize("settings", [{"landmarks": 0}, {"chunk": 0}, {"sinks": -1}, {"seed": 0.5}, {"chunk": 2.5}])
def test_settings_that_make_no_sense_are_refused(settings):
    with pytest.raises(ValueError, match=f"{next(iter(settings))} is"):
        Landmarks(**settings)


def test_a_negative_scale_is_refused():
    with pytest.raises(ValueError, match="scale is -1"):
        Landmarks(**SETTINGS)(*tensors(), scale=-1.0)


def test_the_last_query_alone_may_come_without_a_causal_mask():
    q, k, v = tensors()  # as the seam hands over one token behind a cache
    whole = trained()
    last = whole(q[:, :, -1:], k, v, Mask(offset=44))
    assert torch.allclose(last, whole(q, k, v, Mask(causal=True))[:, :, -1:])


def test_what_is_learned_is_not_thrown_away_for_another_number_of_heads():
    mechanism = Landmarks(**SETTINGS)
    mechanism(*tensors(heads=2))
    mechanism.bfloat16()
    mechanism(*tensors(heads=4))  # only drawn so far
    mechanism.weights.data[0, 0] = 1.0
    with pytest.raises(ValueError, match="learned for 4 heads of 6 dims; fit new ones for 2 heads of 6 dims"):
        mechanism(*tensors(heads=2))
    with pytest.raises(ValueError, match="fit new ones for 4 heads of 8 dims"):
        mechanism(*tensors(heads=4, dim=8))


def test_another_number_of_landmarks_does_not_load():
    with pytest.raises(ValueError, match=r"5 landmarks were saved, not those of Landmarks\(landmarks=16\); load into landmarks=5"):
        Landmarks(landmarks=16).load_state_dict(trained().state_dict())
