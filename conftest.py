"""What every test and doctest starts from: torch in sight, one seed, one thread, no network."""

import os

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
torch.set_num_threads(1)  # two workers share two cores


@pytest.fixture(autouse=True)
def _same_start(doctest_namespace):
    torch.manual_seed(0)
    doctest_namespace["torch"] = torch
