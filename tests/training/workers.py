"""Training with growth, in this process or in one of two; run as a script it is one of them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from models import llama
from transformers import Trainer, TrainingArguments

from heedful.training import Grow


def texts(count: int = 48, length: int = 16) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(4, 64, (count, length), generator=generator).cumsum(1) % 60 + 4
    return [{"input_ids": row, "labels": row.clone()} for row in ids]


def arguments(folder: Path, **more: Any) -> TrainingArguments:
    settings = {
        "max_steps": 9,
        "per_device_train_batch_size": 4,
        "learning_rate": 3e-3,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
    }
    quiet = {"report_to": [], "disable_tqdm": True, "use_cpu": True, "save_strategy": "no", "seed": 0, "data_seed": 0}
    return TrainingArguments(str(folder), **(settings | quiet | more))


def trainer(folder: Path, callbacks: list[Any], **more: Any) -> Trainer:
    return Trainer(llama().model.train(), arguments(folder, **more), train_dataset=texts(), callbacks=callbacks)


def growing(**more: Any) -> Grow:
    return Grow(**({"every": 3, "new": 2, "budget": 0.05, "examples": 16, "batch": 4} | more))


if __name__ == "__main__":
    folder, rank = Path(sys.argv[1]), sys.argv[2]
    grow = growing()
    made = trainer(folder, [grow], ddp_backend="gloo", ddp_find_unused_parameters=False)
    made.train()
    torch.save({"events": grow.events, "state": made.model.state_dict()}, folder / f"rank{rank}.pt")
