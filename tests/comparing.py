"""How far two answers lie apart, and an answer with its gradients: what the mechanisms' own tests share."""

from __future__ import annotations

import torch


def off(found, wanted):
    """The relative distance."""
    return float((found.double() - wanted.double()).norm().detach() / wanted.double().norm().detach())


def run(attend, *inputs):
    """The output and the gradients of a fixed random sum of it."""
    inputs = [t.detach().clone().requires_grad_() for t in inputs]
    out = attend(*inputs)
    torch.manual_seed(1)
    return out, *torch.autograd.grad((out * torch.randn(out.shape)).sum(), inputs)
