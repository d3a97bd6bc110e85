"""Saving: what comes back computes the same; what cannot be saved or loaded is refused, and leaves nothing behind."""

import json
import shutil

import pytest
import torch
from huggingface.zoo import BY_NAME
from models import bert
from safetensors import SafetensorError

import heedful as hd
from heedful import saving
from heedful.huggingface.layer import Resized
from heedful.huggingface.sizes import natives

FAMILIES = ("bert", "gpt2", "llama", "qwen2", "vit", "whisper", "t5")


def changed(name, dtype=torch.float64):
    """A tiny model with other sizes in every key head, its pairs chosen by its weights."""
    model = BY_NAME[name].build("sdpa", dtype=dtype)
    plan = {}
    for layer, own in natives(model).items():
        qk = tuple(4 if own.pairs is not None else own.qk - 1 - i % 2 for i in range(own.key_heads))
        plan[layer] = hd.Resize(qk=qk, v=tuple(own.v - 2 - i % 3 for i in range(own.key_heads)))
    return hd.apply(model, hd.Plan(plan))


def answer(model, name):
    _, given, _ = next(iter(BY_NAME[name].inputs()))
    dtype = next(model.parameters()).dtype
    with torch.no_grad():
        out = model(**{k: x.to(dtype) if torch.is_tensor(x) and x.is_floating_point() else x for k, x in given.items()})
    return out["logits"] if "logits" in out else out["last_hidden_state"]


@pytest.mark.parametrize("name", FAMILIES)
def test_what_comes_back_computes_the_same(name, tmp_path):
    made = changed(name)
    folder = made.save(tmp_path / "made")
    again = hd.load(folder, dtype=torch.float64)
    assert torch.equal(answer(again.model, name), answer(made.model, name))
    assert again.plan == made.plan
    assert hd.load(again.save(tmp_path / "again"), dtype=torch.float64).fingerprint == again.fingerprint
    assert type(again.model) is type(made.model)


@pytest.mark.parametrize("name, setting", [("vit", "head_dim"), ("t5", "d_kv")])
def test_one_size_everywhere_is_saved_for_stock_transformers(name, setting, tmp_path):
    model = BY_NAME[name].build("sdpa").double()
    made = hd.apply(model, hd.Plan({layer: hd.Resize(qk=5, v=5) for layer in natives(model)}))
    folder = made.save(tmp_path / "made")
    assert not (folder / "plan.json").exists()
    stock = type(model).from_pretrained(folder, dtype=torch.float64)
    assert getattr(stock.config, setting) == 5
    assert not any(isinstance(m, Resized) for m in stock.modules())
    torch.testing.assert_close(answer(stock, name), answer(made.model, name), atol=1e-10, rtol=0)


def test_a_model_as_it_was_is_saved_plainly_with_its_tokenizer(tmp_path):
    given = bert()
    given.save(tmp_path / "plain")
    again = hd.load(tmp_path / "plain")
    assert again.plan is None
    assert again.tokenizer("w1")["input_ids"] == given.tokenizer("w1")["input_ids"]


def test_resized_twice_and_saved_twice(tmp_path):
    made = changed("llama")
    layer = "model.layers.0.self_attn"
    pair = made.plan.layers[layer].pairs[0][1]
    smaller = hd.apply(made, hd.Plan({layer: hd.Resize(qk=2, pairs=((pair,), (pair,)))}))
    assert smaller.plan.layers[layer].pairs == ((pair,), (pair,))
    again = hd.load(smaller.save(tmp_path / "made"), dtype=torch.float64)
    assert torch.equal(answer(again.model, "llama"), answer(smaller.model, "llama"))


def test_half_precision_comes_back(tmp_path):
    made = changed("llama", torch.bfloat16)
    again = hd.load(made.save(tmp_path / "made"), dtype=torch.bfloat16)
    assert torch.equal(answer(again.model, "llama"), answer(made.model, "llama"))


def test_stock_transformers_finds_no_weights_to_fill_up_wrongly(tmp_path):
    made = changed("gpt2")
    with pytest.raises(OSError):
        type(made.model).from_pretrained(made.save(tmp_path / "made"))


@pytest.mark.parametrize("kind", [OSError(28, "No space left on device"), SafetensorError("IoError: No space left on device")])
def test_a_full_disk_leaves_nothing(kind, tmp_path, monkeypatch):
    def full(model, path):
        with open(path, "wb") as file:
            file.write(b"half")
        raise kind

    monkeypatch.setattr(saving, "save_model", full)
    with pytest.raises(OSError, match=r"cannot write .*No space left on device.*Nothing was left"):
        changed("bert").save(tmp_path / "made")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_taken_is_left_alone(tmp_path):
    (tmp_path / "mine").write_text("precious")
    with pytest.raises(ValueError, match="not empty"):
        bert().save(tmp_path)
    assert (tmp_path / "mine").read_text() == "precious"


def test_damaged_folders_are_refused(tmp_path):
    folder = changed("bert").save(tmp_path / "made")
    for name, text, said in (("heedful.safetensors", "x", "damaged"), ("plan.json", "{}", "damaged or no plan")):
        other = shutil.copytree(folder, tmp_path / name)
        (other / name).write_text(text)
        with pytest.raises(ValueError, match=said):
            hd.load(other)
    plan = json.loads((folder / "plan.json").read_text())
    layer = next(iter(plan["layers"]))
    plan["layers"][layer]["resize"]["qk"] = 3
    (folder / "plan.json").write_text(json.dumps(plan))
    with pytest.raises(ValueError, match="does not fit its plan"):
        hd.load(folder)


def test_a_swapped_mechanism_is_not_lost_silently(tmp_path):
    given = bert()
    hd.swap(given.model, {"encoder.layer.0.attention.self": hd.mechanisms.Local(window=4)})
    with pytest.raises(ValueError, match=r"unswap"):
        given.save(tmp_path / "made")
