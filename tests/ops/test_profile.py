"""Row and column profiles equal those of the dense matrix, whatever the tiles."""

import importlib

import dense
import pytest
import torch

from heedful.attention import Capture, Mask

CALLS = dense.calls()
by_call = pytest.mark.parametrize("mask, queries, keys", [c[1:] for c in CALLS], ids=[c[0] for c in CALLS])
EXTRA = {"": {}, "cap": {"cap": 1.5}, "null": {"null": torch.tensor([0.5, -20.0, 3.0, 12.0])}}
EXTRA["both"] = EXTRA["cap"] | EXTRA["null"]
sweep = importlib.import_module("heedful.ops.sweep")


def capture(mask, queries, keys, extra="", dtype=torch.float32, **more):
    q, k, v = dense.tensors(queries, keys, dtype=dtype)
    return Capture("layer", q, k, v, mask, 0.4, **EXTRA[extra], **more)


def close(found, truth, tolerance=2e-6):
    torch.testing.assert_close(found.double(), truth, rtol=tolerance, atol=tolerance)


def check(call, tolerance=2e-6):
    """Against the dense matrix; rows that see nothing are not valid, and count nowhere."""
    p, _ = dense.probabilities(call)
    real = torch.ones(p.shape[0], p.shape[2], dtype=torch.bool) if call.real is None else call.real
    sample = torch.arange(p.shape[2]) if call.sample is None else call.sample
    valid = (real & (p.amax(-1) > 0).any(1))[:, sample]
    assert torch.equal(call.rows.valid, valid)
    for name, truth in dense.rows(call).items():
        found, truth = getattr(call.rows, name).double(), truth[:, :, sample]
        seen = valid[:, None].expand(found.shape[:3]) & (truth if truth.ndim == 3 else truth[..., 0]).isfinite()
        seen = seen & (found.abs().flatten(3).amax(-1) < 1e29 if found.ndim == 4 else found.abs() < 1e29)
        assert seen.sum() >= valid.sum()
        close(found[seen], truth[seen], tolerance * 3)
    weight = valid[:, None, :, None]
    moved = dense.moved(call)[:, :, sample] * weight
    close(call.columns.load, (p[:, :, sample] * weight).sum(2), tolerance)
    close(call.columns.squares, (p[:, :, sample].square() * weight).sum(2), tolerance)
    close(call.columns.moved, moved.sum(2), tolerance * float(1 + moved.sum(2).max()))
    return moved


@by_call
@pytest.mark.parametrize("extra", EXTRA)
def test_every_profile_equals_the_dense_matrix(mask, queries, keys, extra):
    check(capture(mask, queries, keys, extra))


@by_call
def test_sampled_rows_give_the_same_numbers(mask, queries, keys):
    sample = torch.arange(0, queries, 3)
    call = capture(mask, queries, keys, sample=sample)
    moved = check(call)
    close(call.rows.moved, moved.sum(-1) + 0 * call.rows.moved, 2e-6 * float(1 + moved.sum(-1).max()))


@pytest.mark.parametrize("name", list(dense.MASKS))
@pytest.mark.parametrize("tile, rows", [(64, 128), (300, 3), (1400, 7)])
def test_the_size_of_tiles_does_not_matter(name, tile, rows, monkeypatch):
    monkeypatch.setattr(sweep, "TILE", tile)
    monkeypatch.setattr(sweep, "ROWS", rows)
    check(capture(dense.MASKS[name](40, 40), 40, 40, "both"))


@pytest.mark.parametrize("name", ["everything", "causal padding left", "window", "bias"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_dtypes_are_raised_to_float32_at_least(name, dtype):
    call = capture(dense.MASKS[name](17, 17), 17, 17, dtype=dtype)
    assert call.rows.lse.dtype == torch.promote_types(dtype, torch.float32)
    check(call, 1e-12 if dtype == torch.float64 and name != "bias" else 2e-6)


def test_padding_queries_count_nowhere():
    real = dense.padding(17, left=True)
    check(capture(Mask(keys=real), 17, 17, real=real))
    check(capture(Mask(keys=real, causal=True), 17, 17, real=real, sample=torch.tensor([0, 3, 11, 16])))


def test_a_batch_of_one_mask_serves_all():
    real = dense.padding(17)[:1]
    call = capture(Mask(keys=real), 17, 17, real=real)
    twice = capture(Mask(keys=real.expand(2, -1)), 17, 17, real=real.expand(2, -1))
    assert torch.equal(call.columns.load, twice.columns.load)
    assert torch.equal(call.rows.near, twice.rows.near)
    assert call.tokens.tolist() == twice.tokens.tolist()


def test_the_keys_in_sight_are_counted():
    for name, make in (dense.MASKS | dense.SQUARE).items():
        if "bias" not in name:
            mask = make(17, 17)
            truth = (mask.dense(17, 17) == 0).sum(-1).expand(2, 1, 17)
            assert torch.equal(capture(mask, 17, 17).rows.visible, truth.float()), name


def test_a_head_that_a_bias_blinds_gives_no_mass():
    bias = torch.zeros(1, dense.HEADS, 9, 9)
    bias[:, 1, 4] = -torch.inf
    call = capture(Mask(bias=bias), 9, 9)
    assert call.rows.valid.all()
    assert call.rows.peak[:, 1, 4].eq(0).all()
    close(call.columns.load, dense.probabilities(call)[0].sum(2))


def test_many_rows_are_judged_by_a_few():
    q, k, v = dense.tensors(300, 300)
    call = Capture("layer", q, k, v, scale=0.4, sample=torch.arange(300))
    known = ~call.rows.moved.isnan()
    assert 32 <= known[0, 0].sum() <= 64
    moved = dense.moved(call) * known[..., None]
    torch.testing.assert_close(call.columns.moved.double(), moved.sum(2), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(call.rows.moved[known].double(), moved.sum(-1)[known], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("sizes", [(0, 4), (4, 0), (0, 0)])
def test_nothing_to_look_at_gives_empty_profiles(sizes):
    call = capture(Mask(), *sizes)
    assert call.rows.lse.shape == (2, 4, sizes[0])
    assert call.columns.load.shape == (2, 4, sizes[1])
    assert not call.rows.valid.any()


def test_an_empty_batch_gives_empty_profiles():
    q = torch.zeros(0, 2, 5, 4)
    call = Capture("layer", q, q, q)
    assert call.rows.near.shape[:3] == (0, 2, 5)
    assert call.columns.load.shape == (0, 2, 5)


def test_no_gradient_is_kept():
    q, k, v = (t.requires_grad_() for t in dense.tensors(9, 9))
    call = Capture("layer", q, k, v)
    assert not call.rows.entropy.requires_grad
    assert not call.columns.moved.requires_grad
