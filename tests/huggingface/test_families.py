"""The seam gives what eager attention gives, for every family, and its captures say how."""

import pytest
import torch

from heedful.attention import Capture
from heedful.huggingface import coverage, watching

from .zoo import FAMILIES, Family


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_the_seam_equals_eager_and_sees_every_attention_call(family: Family):
    model = family.build()
    for shown, given, real in family.inputs():
        captures: list[Capture] = []
        with torch.no_grad():
            expected = answer(model, given)
            with watching(model, captures.append):
                got = answer(model, given)
        error = (got - expected)[... if real is None else real].abs().max()
        assert error <= 2e-6, f"{family.name}, {shown}: the seam differs from eager by {error:.1e}"
        for capture in captures:
            wrong = recomputed_error(capture)
            assert wrong <= 2e-6, f"{family.name}, {shown}: {capture.layer}'s capture explains its output only to {wrong:.1e}"
    coverage(model, lambda: model(**next(iter(family.inputs()))[1])).check()


def answer(model, given):
    out = model(**given)
    for name in ("logits", "last_hidden_state", "image_embeds"):
        if out.get(name) is not None:
            return out[name]
    raise AssertionError(f"no output to compare among {list(out)}")


def recomputed_error(capture: Capture) -> float:
    """How far the captured output is from softmax over the dense mask, where a query sees a key."""
    q, k, v = capture.q.double(), capture.k.double(), capture.v.double()
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    logits = q @ k.mT * capture.scale
    if capture.cap is not None:
        logits = capture.cap * torch.tanh(logits / capture.cap)
    logits = logits + capture.mask.dense(q.shape[-2], k.shape[-2])
    seeing = (logits > -torch.inf).any(-1)
    if capture.null is not None:
        logits = torch.cat([logits, capture.null.double()[None, :, None, None].expand(*logits.shape[:3], 1)], -1)
    expected = logits.softmax(-1)[..., : k.shape[-2]] @ v
    assert capture.out is not None
    return float((capture.out - expected)[seeing].abs().max() / v.abs().max().clamp_min(1))
