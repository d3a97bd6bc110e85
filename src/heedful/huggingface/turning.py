"""Turning: rotary embedding of heads that keep some frequency pairs, with dims behind them that do not turn."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Turning(nn.Module):
    """Turns heads laid side by side; a head's dims are the first halves of its pairs, their second halves, and those that stay.

    >>> x, angle = torch.tensor([[[1.0, 0.0, 5.0]]]), torch.tensor([[[0.3, 0.6, 0.3, 0.6]]])
    >>> Turning((3,), ((1,),))(x, angle.cos(), angle.sin())  # the second frequency alone, and a dim that stays
    tensor([[[0.8253, 0.5646, 5.0000]]])
    """

    def __init__(self, sizes: Sequence[int], pairs: Sequence[Sequence[int]]):
        super().__init__()
        alike = len(set(zip(sizes, map(tuple, pairs), strict=True))) == 1
        self.units = len(sizes) if alike else 1  # heads alike share one set of angles
        frequency, partner, sign, start = [], [], [], 0
        for size, kept in zip(sizes[:1] if alike else sizes, pairs, strict=False):
            count, free = len(kept), size - 2 * len(kept)
            frequency += [*kept, *kept, *[-1] * free]
            partner += [start + (i + count) % (2 * count) for i in range(2 * count)] + [start + 2 * count + i for i in range(free)]
            sign += [-1.0] * count + [1.0] * count + [0.0] * free
            start += size
        self.stays = -1 in frequency
        self.frequency: Tensor
        self.partner: Tensor
        self.sign: Tensor
        self.register_buffer("frequency", torch.tensor(frequency), persistent=False)
        self.register_buffer("partner", torch.tensor(partner), persistent=False)
        self.register_buffer("sign", torch.tensor(sign), persistent=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x (batch, tokens, all dims) turned by the angles whose cosines and sines (batch, tokens, 2 x frequencies) are given."""
        index = self.frequency
        if self.stays:  # a last column for dims that do not turn
            cos, sin = F.pad(cos, (0, 1), value=1.0), F.pad(sin, (0, 1))
            index = index % cos.shape[-1]
        cos, sin = cos.index_select(-1, index), sin.index_select(-1, index) * self.sign.to(sin.dtype)
        heads = x.unflatten(-1, (self.units, -1))
        turned = heads * cos[:, :, None] + heads.index_select(-1, self.partner) * sin[:, :, None]
        return turned.flatten(-2)
