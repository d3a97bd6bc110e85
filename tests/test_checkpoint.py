"""A checkpoint is loaded from where it is, or refused with a reason."""

import json

import pytest
import torch
from models import bert, llama

from heedful import Checkpoint, load, swap, unswap
from heedful.mechanisms import Hard, Softmax


@pytest.fixture
def folder(tmp_path):
    made = bert()
    made.model.save_pretrained(tmp_path / "tiny")
    made.processor.save_pretrained(tmp_path / "tiny")
    return tmp_path / "tiny"


def edit(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


def test_a_folder_gives_the_model_and_its_tokenizer(folder):
    loaded = load(folder)
    assert type(loaded.model).__name__ == "BertModel"
    assert loaded.tokenizer("w1")["input_ids"] == [2, 5, 3]
    assert loaded.name == "tiny"
    assert loaded.fingerprint == load(str(folder)).fingerprint


def test_a_model_in_hand_is_taken_as_it_is():
    made = bert()
    assert load(made) is made
    assert load(made.model).model is made.model


def test_the_class_that_was_saved_is_loaded(tmp_path):
    llama().model.save_pretrained(tmp_path)
    assert type(load(tmp_path).model).__name__ == "LlamaForCausalLM"


def test_half_precision_weights_are_read_as_float32_on_a_cpu(tmp_path):
    llama().model.bfloat16().save_pretrained(tmp_path)
    assert next(load(tmp_path, device="cpu").model.parameters()).dtype == torch.float32


def test_fingerprints_tell_weights_apart():
    assert bert(0).fingerprint == bert(0).fingerprint
    assert bert(0).fingerprint != bert(1).fingerprint


def test_fingerprints_do_not_depend_on_threads_or_on_the_precision_of_the_copy():
    made = bert()
    threads, first = torch.get_num_threads(), made.fingerprint
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            assert made.fingerprint == first
    finally:
        torch.set_num_threads(threads)
    made.model.bfloat16()
    half = made.fingerprint
    made.model.float()
    assert half == made.fingerprint != first


def test_fingerprints_see_weights_that_change_places():
    made = bert()
    first = made.fingerprint
    weight = made.model.encoder.layer[0].attention.self.query.weight.data
    weight.copy_(weight.flip(0))  # the sum is as before
    assert made.fingerprint != first


def test_fingerprints_tell_swapped_mechanisms_apart():
    made = bert()
    first, layer = made.fingerprint, "encoder.layer.0.attention.self"
    found = {first}
    for mechanism in (Softmax(beta=2.0), Softmax(beta=3.0), Hard()):
        swap(made.model, {layer: mechanism})
        found.add(made.fingerprint)
    assert len(found) == 4
    unswap(made.model)
    assert made.fingerprint == first


def test_a_missing_folder_is_named():
    with pytest.raises(FileNotFoundError, match=r"no file or folder \./nowhere"):
        load("./nowhere")


def test_an_unknown_model_is_refused_with_what_to_give(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ValueError, match="hub id such as org/name, a folder"):
        load("no-such-org/no-such-model")


def test_a_folder_without_a_model_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"has no config\.json and 0 \.gguf files"):
        load(tmp_path)


def test_a_file_of_another_kind_is_refused(tmp_path):
    (tmp_path / "model.bin").write_bytes(b"")
    with pytest.raises(ValueError, match=r"is a file but no \.gguf"):
        load(tmp_path / "model.bin")


def test_a_models_own_code_is_not_run_unasked(folder):
    (folder / "modeling_own.py").write_text("raise SystemExit('ran')")
    edit(folder, model_type="own", architectures=["OwnModel"], auto_map={"AutoModel": "modeling_own.OwnModel"})
    with pytest.raises(ValueError, match="remote_code=True"):
        load(folder)


@pytest.fixture
def unasked(monkeypatch):
    """Fails where transformers asks whether to run code."""
    monkeypatch.setattr("builtins.input", lambda text="": pytest.fail(f"asked: {text}"))


def test_a_processors_own_code_gives_way_to_the_tokenizer_without_asking(folder, unasked):
    (folder / "evil.py").write_text("raise SystemExit('ran')")
    (folder / "processor_config.json").write_text(json.dumps({"auto_map": {"AutoProcessor": "evil.Evil"}}))
    assert load(folder).tokenizer("w1")["input_ids"] == [2, 5, 3]


def test_a_tokenizers_own_code_is_refused_without_asking(folder, unasked):
    (folder / "evil.py").write_text("raise SystemExit('ran')")
    (folder / "tokenizer.json").unlink()
    own = {"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["evil.Evil", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(own))
    with pytest.raises(ValueError, match=r"tokenizer or processor of .* remote_code=True"):
        load(folder)


def test_a_known_models_own_code_is_not_run_or_asked_about(folder, unasked):
    (folder / "evil.py").write_text("raise SystemExit('ran')")
    edit(folder, auto_map={"AutoModel": "evil.Evil", "AutoConfig": "evil.Evil"}, architectures=None)
    assert type(load(folder).model).__module__.startswith("transformers.")


def test_a_model_type_that_transformers_does_not_know_is_refused(folder):
    edit(folder, model_type="unheard_of")
    with pytest.raises(ValueError, match="'unheard_of', which this transformers does not know"):
        load(folder)


@pytest.mark.parametrize("file, content", [("config.json", b"{half"), ("model.safetensors", b"\x10")])
def test_a_damaged_checkpoint_is_refused(folder, file, content):
    (folder / file).write_bytes(content)
    with pytest.raises(ValueError, match=r"damaged|cannot load"):
        load(folder)


def test_missing_weights_are_refused(folder):
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="cannot load"):
        load(folder)


def test_weights_that_are_missing_from_the_file_are_told(folder):
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    del weights["encoder.layer.1.attention.self.query.weight"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"encoder\.layer\.1\.attention\.self\.query\.weight"):
        load(folder)


def test_a_name_and_a_processor_can_be_given():
    assert Checkpoint(bert().model, name="mine").tokenizer is None


@pytest.mark.parametrize("device, said", [("cuda:99", "torch finds"), ("gpu", "no device 'gpu'")])
def test_a_device_that_is_not_there_is_told(folder, device, said):
    with pytest.raises(ValueError, match=said):
        load(folder, device=device)


def test_a_gpu_is_refused_where_torch_has_none(folder, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="torch finds 0 GPUs"):
        load(folder, device="cuda")
