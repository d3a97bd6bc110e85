"""Grow in a Trainer: it grows within its budget, tells what it did, resumes, and keeps processes alike."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from models import llama
from transformers import BertConfig, BertForMaskedLM, Trainer

from heedful.huggingface.adopt import sizes_of
from heedful.training import Grow
from training.workers import growing, texts, trainer

TESTS = Path(__file__).parents[1]


def dims(model):
    return {name: own.qk for name, own in sizes_of(model).items()}


def test_layers_grow_within_the_budget_and_the_log_tells(tmp_path):
    grow = growing()
    made = trainer(tmp_path, [grow])
    before = sum(p.numel() for p in made.model.parameters())
    made.train()
    after = sum(p.numel() for p in made.model.parameters())
    assert 0 < after - before <= 0.05 * before
    told = [event for event in made.state.log_history if "grow_layers" in event]
    assert [event["step"] for event in told] == [3, 6]
    assert sum(event.get("grow_added", 0) for event in told) == after - before
    grown = [event for event in told if event["grow_layers"]]
    assert all({"grow_predicted", "grow_realised", "grow_gain"} <= event.keys() for event in grown)
    assert all(torch.isfinite(torch.tensor(event["loss"])) for event in made.state.log_history if "loss" in event)
    owned = {id(p) for group in made.optimizer.param_groups for p in group["params"]}
    assert owned == {id(p) for p in made.model.parameters()}


def test_a_trainer_that_resumes_ends_where_one_that_never_stopped_ends(tmp_path):
    whole = trainer(tmp_path / "whole", [growing()])
    whole.train()
    first = trainer(tmp_path / "parts", [growing()], save_strategy="steps", save_steps=5)
    first.train()
    again = trainer(tmp_path / "parts", [growing()])
    again.train(resume_from_checkpoint=str(tmp_path / "parts" / "checkpoint-5"))
    assert dims(again.model) == dims(whole.model) != dims(llama().model)
    state = again.model.state_dict()
    for name, x in whole.model.state_dict().items():
        torch.testing.assert_close(state[name], x, rtol=1e-4, atol=1e-6)
    told = json.loads((tmp_path / "parts" / "checkpoint-5" / "trainer_state.json").read_text())["log_history"]
    assert any("grow_layers" in event for event in told)


def test_no_budget_or_too_little_worth_leaves_the_model_alone(tmp_path):
    for options in ({"budget": 0.0}, {"worth": 1e9}):
        grow = growing(**options)
        made = trainer(tmp_path, [grow], max_steps=4)
        made.train()
        assert dims(made.model) == dims(llama().model)
        assert grow.events[0]["grow_layers"] == 0


def test_two_processes_decide_alike_and_stay_alike(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    settings = {
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
    }
    source = os.pathsep.join([str(TESTS.parent / "src"), str(TESTS), str(TESTS.parent)])
    running = [
        subprocess.Popen(
            [sys.executable, str(TESTS / "training" / "workers.py"), str(tmp_path), str(rank)],
            env={**os.environ, **settings, "PYTHONPATH": source, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in (0, 1)
    ]
    said = [process.communicate(timeout=240)[0] for process in running]
    assert all(process.returncode == 0 for process in running), said[0] + said[1]
    one, other = (torch.load(tmp_path / f"rank{rank}.pt") for rank in (0, 1))
    assert one["events"] == other["events"]
    assert any(event["grow_layers"] for event in one["events"])
    assert all(torch.equal(x, other["state"][name]) for name, x in one["state"].items())


def test_what_grow_cannot_do_is_refused_before_training(tmp_path):
    with pytest.raises(ValueError, match="at least 1"):
        Grow(every=0)
    made = trainer(tmp_path, [growing(every=1)])
    made.train_dataset = texts(3)
    with pytest.raises(ValueError, match="has 3 examples"):
        made.train()


def test_a_masked_language_model_grows_too(tmp_path):
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16, "vocab_size": 64}
    grow = growing(every=2)
    like = trainer(tmp_path, [])
    made = Trainer(BertForMaskedLM(BertConfig(**sizes)), like.args, train_dataset=texts(), callbacks=[grow])
    made.args.max_steps = 3
    made.train()
    assert grow.events[0]["grow_layers"] > 0
