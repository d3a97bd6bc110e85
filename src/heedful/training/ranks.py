"""Ranks: several processes that train one model add their statistics once, and their wrapper learns of new parameters."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..statistics.growth import Growth

KEPT = (
    "device_ids",
    "output_device",
    "dim",
    "broadcast_buffers",
    "find_unused_parameters",
    "gradient_as_bucket_view",
    "static_graph",
)


def world() -> tuple[int, int]:
    """The number of this process, and how many there are."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_available() and dist.is_initialized() else (0, 1)


def summed(*numbers: float) -> tuple[float, ...]:
    """Each number added over processes."""
    if world()[1] == 1:
        return numbers
    whole = torch.tensor(numbers, dtype=torch.float64)
    _add(whole)
    return tuple(whole.tolist())


def summed_growths(growths: Mapping[str, Growth]) -> dict[str, Growth]:
    """The statistics of all layers added over processes, in one message."""
    if world()[1] == 1:
        return dict(growths)
    parts = [x for growth in growths.values() for x in growth.tensors.values()]
    whole = torch.cat([x.flatten() for x in parts])
    _add(whole)
    taken = iter(x.view_as(part) for x, part in zip(whole.split([part.numel() for part in parts]), parts, strict=True))
    return {name: type(growth)(**{key: next(taken) for key in growth.tensors}) for name, growth in growths.items()}


def _add(x: torch.Tensor) -> None:
    """In place, on the device that the processes talk by."""
    if dist.get_backend() == "nccl" and x.device.type == "cpu":
        moved = x.cuda()
        dist.all_reduce(moved)
        x.copy_(moved)
    else:
        dist.all_reduce(x)


class Wrapper:
    """The DistributedDataParallel that calls a model, noticed as it does; `rebuild` makes its gradient buckets anew, in place."""

    def __init__(self, model: nn.Module):
        self.model, self.found = model, None
        model.register_forward_pre_hook(self._notice)

    def _notice(self, *_: Any) -> None:
        calling: Any = getattr(DistributedDataParallel, "_active_ddp_module", None)
        if calling is not None and calling.module is self.model:
            self.found = calling

    def rebuild(self) -> None:
        """Let the wrapper reduce the parameters that the model has now."""
        if self.found is None:
            if world()[1] > 1:
                raise ValueError(
                    "several processes train but no DistributedDataParallel calls the model; Grow knows no other way yet."
                )
            return
        kept = {name: getattr(self.found, name) for name in KEPT if hasattr(self.found, name)}
        accepted = inspect.signature(DistributedDataParallel.__init__).parameters
        group = self.found.process_group
        training, calls = self.found.training, self.found.__dict__.get("forward")
        DistributedDataParallel.__init__(
            self.found, self.model, process_group=group, **{k: x for k, x in kept.items() if k in accepted}
        )
        self.found.train(training)
        if calls is not None:
            self.found.forward = calls
