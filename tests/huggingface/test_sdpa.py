"""Plain PyTorch models: what is seen of torch's own attention says what it computed."""

import pytest
import torch
import torch.nn.functional as F

from heedful.huggingface import watching_sdpa
from heedful.mechanisms import Softmax

PAST = torch.ones(5, 5, dtype=torch.bool).tril()
MASKS = {
    "none": {},
    "causal by name": {"is_causal": True},
    "causal by a mask": {"attn_mask": PAST},
    "causal by an additive mask": {"attn_mask": torch.zeros(5, 5).masked_fill(~PAST, -torch.inf)},
    "padding": {"attn_mask": torch.tensor([True, True, True, False, False]).expand(5, 5)},
    "a bias": {"attn_mask": torch.randn(5, 5, generator=torch.Generator().manual_seed(1))},
}


class Plain(torch.nn.Module):
    def __init__(self, **given):
        super().__init__()
        self.given = given

    def forward(self, x):
        q, k, v = x.unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v, **self.given)


@pytest.mark.parametrize("given", MASKS.values(), ids=MASKS)
def test_softmax_on_what_was_seen_gives_what_came_out(given):
    seen = []
    with watching_sdpa(model := Plain(**given), seen.append):
        out = model(torch.randn(2, 5, 24, generator=torch.Generator().manual_seed(0)))
    (capture,) = seen
    assert torch.equal(capture.out, out)
    again = Softmax()(capture.q, capture.k, capture.v, capture.mask, scale=capture.scale)
    torch.testing.assert_close(again, out)
