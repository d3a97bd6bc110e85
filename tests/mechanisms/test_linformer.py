"""Linformer: softmax over projected keys, spelled out densely in float64 one text at a time, is the truth."""

import copy

import pytest
import torch
from torch import nn

from heedful.attention import Capture, Mask, Unsupported
from heedful.mechanisms import Linformer, Softmax
from heedful.mechanisms.linformer import fit_head, pivots

REAL = torch.arange(40) < torch.tensor([[40], [23]])
SHUFFLED = torch.stack([REAL[0], REAL[1, torch.randperm(40, generator=torch.Generator().manual_seed(3))]])


def tensors(queries=40, keys=40, batch=2):
    return [torch.randn(batch, 3, tokens, 8) for tokens in (queries, keys, keys)]


def mechanism(keys=5, length=40, seed=0):
    """One with projections of both signs."""
    made = Linformer(keys, length)
    made.prepare(3, 8)
    source = torch.Generator().manual_seed(seed)
    for rows in made.parameters():
        rows.data += torch.randn(rows.shape, generator=source) / length
    return made


def published(q, k, v, on_keys, on_values):
    """softmax(q (E k)^T / sqrt(d)) F v with each row divided by its share on the text, then completed to a sum of one; float64."""
    q, k, v, on_keys, on_values = (t.double() for t in (q, k, v, on_keys, on_values))
    n, shares = k.shape[-2], []
    completed = []
    for rows in (on_keys, on_values):
        share = rows[..., :n].abs().sum(-1, keepdim=True) / rows.abs().sum(-1, keepdim=True)
        here = rows[..., :n] / share
        completed.append(here + (1 - here.sum(-1, keepdim=True)) / n)
        shares.append(share)
    logits = q @ (completed[0] @ k).mT / q.shape[-1] ** 0.5 + shares[0].mT.log()
    return logits.softmax(-1) @ (completed[1] @ v)


def off(found, wanted):
    return float((found.double() - wanted.double()).norm().detach() / wanted.double().norm().detach().clamp_min(1e-30))


def run(attend, *inputs):
    """The output and the gradients of a fixed random sum of it."""
    inputs = [t.detach().clone().requires_grad_() for t in inputs]
    out = attend(*inputs)
    torch.manual_seed(1)
    return out, *torch.autograd.grad((out * torch.randn(out.shape)).sum(), inputs)


def patterned(texts, tokens=40, seed=0):
    """Captures of heads that look at few fixed positions, whatever the text: what Linformer can learn."""
    source = torch.Generator().manual_seed(seed)
    where = torch.randn(3, 40, 8, generator=torch.Generator().manual_seed(9)) * 2
    for _ in range(texts):
        q, k, v = torch.randn(3, 1, 3, tokens, 8, generator=source)
        k = 0.2 * k + where[:, :tokens] * (torch.arange(40) % 13 == 0)[:tokens, None]
        yield Capture("layer", q, k, v, scale=1.0)


@pytest.mark.parametrize("queries, keys", [(40, 40), (40, 23), (7, 31), (40, 1)])
def test_it_equals_the_published_formula_with_its_gradients(queries, keys):
    made, inputs = mechanism(), tensors(queries, keys)
    found = run(lambda q, k, v, *rows: torch.func.functional_call(made, dict(zip(("on_keys", "on_values"), rows, strict=True)), (q, k, v)),
                *inputs, made.on_keys, made.on_values)  # fmt: skip
    wanted = run(published, *inputs, made.on_keys, made.on_values)
    for one, other in zip(found, wanted, strict=True):
        assert off(one, other) < 1e-5 or other.abs().max() < 1e-12


def test_at_full_length_rows_that_sum_to_one_are_plain_linformer():
    made, (q, k, v) = mechanism(), tensors()
    for rows in made.parameters():
        rows.data += (1 - rows.data.sum(-1, keepdim=True)) / 40
    wanted = (q @ (made.on_keys @ k).mT / 8**0.5).softmax(-1) @ (made.on_values @ v)
    assert off(made(q, k, v), wanted) < 1e-5


@pytest.mark.parametrize("garbage", [0.0, 1e30, torch.nan])
@pytest.mark.parametrize("real", [REAL, REAL.flip(-1), SHUFFLED], ids=["right", "left", "between"])
def test_each_text_is_attended_as_if_it_were_alone_and_had_no_padding(real, garbage):
    made, inputs = mechanism(), tensors()
    for t in inputs[1:]:
        t.masked_fill_(~real[:, None, :, None], garbage)

    def alone(q, k, v):
        return torch.cat([made(q[i : i + 1], *(t[i : i + 1, :, own] for t in (k, v))) for i, own in enumerate(real)])

    for one, other in zip(run(lambda *qkv: made(*qkv, Mask(keys=real)), *inputs), run(alone, *inputs), strict=True):
        assert off(one, other) < 1e-5


def test_an_empty_text_gives_zero_and_no_gradient_to_the_projections():
    made, inputs = mechanism(), tensors(batch=1)
    out = made(*inputs, Mask(keys=torch.zeros(1, 40, dtype=torch.bool)))
    assert (out == 0).all()
    out.sum().backward()
    assert all((rows.grad == 0).all() for rows in made.parameters())


def test_a_text_longer_than_its_length_is_refused():
    made, (q, k, v) = mechanism(), tensors(40, 41)
    with pytest.raises(
        Unsupported, match=r"Linformer\(length=40\) has no projection for 41 tokens; make it with length=41 or more"
    ):
        made(q, k, v)
    short = torch.arange(41) < torch.tensor([[40], [3]])
    assert off(made(q, k, v, Mask(keys=short))[:1], made(q[:1], k[:1, :, :40], v[:1, :, :40])) < 1e-6


def test_its_projections_learn():
    made, (q, k, v) = mechanism(), tensors()
    wanted = Softmax()(q, k, v)
    optimiser = torch.optim.Adam(made.parameters(), lr=0.01)
    before = off(made(q, k, v), wanted)
    for _ in range(100):
        optimiser.zero_grad()
        (made(q, k, v) - wanted).square().sum().backward()
        optimiser.step()
    assert off(made(q, k, v), wanted) < 0.7 * before


def test_projections_made_in_inference_mode_can_still_learn():
    made, (q, k, v) = Linformer(5, 40), tensors()
    with torch.inference_mode():
        made(q, k, v)
    made(q, k, v).sum().backward()
    assert made.on_keys.grad is not None


def test_a_fit_finds_the_positions_that_every_text_looks_at():
    learned, fresh = Linformer(6, 40).fit(list(patterned(6))), Linformer(6, 40)
    for tokens in (40, 30):
        call = next(patterned(1, tokens, seed=7))
        wanted = Softmax()(call.q, call.k, call.v, scale=1.0)
        assert off(learned(call.q, call.k, call.v, scale=1.0), wanted) < 0.5 * off(fresh(call.q, call.k, call.v, scale=1.0), wanted)


def test_a_fit_with_a_key_for_each_token_is_the_identity():
    q, k = torch.randn(2, 40, 8)
    on_keys, on_values = fit_head([(q, k, 0.5)], 40, 40)
    assert torch.allclose(on_values, on_keys, atol=1e-5)
    assert torch.equal(on_keys.sum(0), torch.ones(40).double())


def test_a_text_of_no_more_tokens_than_projected_keys_is_attended_exactly():
    made = mechanism()
    for real in (torch.arange(40) < torch.tensor([[40], [5]]), torch.arange(40) >= torch.tensor([[0], [38]])):
        inputs = tensors()
        found = run(lambda *qkv, real=real: made(*qkv, Mask(keys=real))[1:], *inputs)
        wanted = run(lambda *qkv, real=real: Softmax()(*qkv, Mask(keys=real))[1:], *inputs)
        for one, other in zip(found, wanted, strict=True):
            assert off(one, other) < 1e-5
    q, k, v = tensors(40, 3)
    assert off(made(q, k, v), Softmax()(q, k, v)) < 1e-6


def test_fitted_values_are_the_least_squares_solution():
    calls = [(torch.randn(40, 8), torch.randn(40, 8), 0.5) for _ in range(4)]
    on_keys, on_values = fit_head(calls, 6, 40)
    p = torch.cat([(q @ k.mT * scale).softmax(-1) for q, k, scale in calls]).double()
    a = torch.cat([(q @ (on_keys.float() @ k).mT * scale).softmax(-1) for q, k, scale in calls]).double()
    best = (p - a @ torch.linalg.lstsq(a, p).solution).norm()
    assert best <= (p - a @ on_values).norm() < 1.001 * best
    assert torch.allclose(on_values.sum(-1), torch.ones(6, dtype=torch.float64))


def test_pivots_take_no_column_twice_even_where_nothing_is_left():
    x = torch.randn(3, 10, dtype=torch.float64)
    assert sorted(pivots(x.mT @ x, 10).tolist()) == list(range(10))
    kept = x[:, pivots(x.mT @ x, 3)]
    assert torch.allclose(kept @ torch.linalg.solve(kept, x), x)


def test_a_fit_sees_real_tokens_alone_and_shared_key_heads():
    q, k = torch.randn(2, 4, 40, 8), torch.randn(2, 2, 40, 8)
    padded = Capture("layer", q, k, k, Mask(keys=REAL), scale=0.3)
    apart = [
        Capture("layer", q[i : i + 1, :, :n], k[i : i + 1, :, :n].repeat_interleave(2, 1), q[:1, :, :n], scale=0.3)
        for i, n in enumerate((40, 23))
    ]
    one, other = Linformer(5, 40).fit([padded]), Linformer(5, 40).fit(apart)
    for name, rows in one.state_dict().items():
        assert torch.allclose(rows, other.state_dict()[name], atol=1e-6)


@pytest.mark.parametrize(
    "captures, needed",
    [
        ([], "no capture of more than 5 tokens; give those of one layer"),
        ([Capture("a", *torch.randn(3, 1, 2, 9, 8)), Capture("b", *torch.randn(3, 1, 3, 9, 8))], "several head counts"),
        ([Capture("a", *torch.randn(3, 1, 2, 9, 8), mask=Mask(causal=True))], "cannot honour a causal mask"),
        ([Capture("a", *torch.randn(3, 1, 2, 41, 8))], "41 tokens; make Linformer with length=41"),
    ],
    ids=["none", "two layers", "causal", "too long"],
)
def test_captures_it_cannot_learn_from_are_refused(captures, needed):
    with pytest.raises(ValueError, match=needed):
        Linformer(5, 40).fit(captures)


def test_its_projections_are_saved_and_loaded_inside_a_model():
    class Host(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = Linformer(5, 40)

    host, (q, k, v) = Host(), tensors()
    assert not host.state_dict()
    host.attention = mechanism()
    for options in ({}, {"assign": True}):
        fresh = Host()
        fresh.load_state_dict(host.state_dict(), **options)
        assert torch.equal(fresh.attention(q, k, v), host.attention(q, k, v))
    assert torch.equal(copy.deepcopy(host).attention(q, k, v), host.attention(q, k, v))
    other = Host()
    other.attention = Linformer(6, 40)
    with pytest.raises(RuntimeError, match="size mismatch"):
        other.load_state_dict(host.state_dict())


def test_it_works_in_a_half_model():
    made, inputs = mechanism(), tensors()
    wanted = made(*inputs)
    assert off(copy.deepcopy(made).bfloat16()(*(t.bfloat16() for t in inputs)), wanted) < 2e-2


@pytest.mark.parametrize(
    "settings, needed",
    [
        ({"keys": 0}, "keys is 0; it must be a whole number of at least 1"),
        ({"length": 1.5}, r"length is 1\.5; it must be"),
        ({"keys": 9, "length": 8}, "9 projected keys of at most 8 save nothing; use keys=8"),
    ],
    ids=str,
)
def test_bad_settings_are_refused_at_once(settings, needed):
    with pytest.raises(ValueError, match=needed):
        Linformer(**settings)


def test_what_is_learned_is_not_thrown_away_for_another_number_of_heads():
    made = Linformer(5, 40)
    made.prepare(2, 8)
    made.bfloat16()
    made.prepare(3, 8)  # only means so far
    made.on_values.data[0, 0, 0] += 1
    with pytest.raises(ValueError, match="learned for 3 heads; fit a new one for 2 heads"):
        made.prepare(2, 8)
