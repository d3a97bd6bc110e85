"""Items become batches of model inputs."""

import dataclasses

import pytest
import torch
from models import SIZES, bert, llama, words

from heedful import Checkpoint, tokens
from heedful.inputs import collate, read
from heedful.texts import Image, Long, Sound, Tokens


def sizes(reading):
    return [[sample.size for sample in group] for group in reading.batches]


def test_texts_are_grouped_by_length_longest_first():
    reading = read(bert(), [words(3), words(40), words(38), words(4)], batch=2, length=None)
    assert sizes(reading) == [[42, 40], [6, 5]]


def test_a_text_much_shorter_than_another_is_not_padded_to_it():
    reading = read(llama(), [words(10), words(98)], batch=8, length=128)
    assert sizes(reading) == [[100], [12]]


def test_a_text_longer_than_the_model_allows_is_cut_and_counted_and_keeps_its_end_token():
    reading = read(bert(), [words(100), words(5)], batch=8, length=None)
    assert reading.truncated == 1
    assert reading.length == reading.longest == 48
    ids = reading.batches[0][0].item.ids
    assert (ids[0], ids[-1], len(ids)) == (2, 3, 48)


def test_a_long_text_is_cut_into_pieces_that_lose_nothing():
    reading = read(bert(), [Long(words(100))], batch=8, length=None)
    pieces = [sample.item.ids for group in reading.batches for sample in group]
    assert reading.truncated == 0
    assert all(piece[0] == 2 and piece[-1] == 3 and len(piece) <= 48 for piece in pieces)
    whole = bert().tokenizer(words(100), add_special_tokens=False)["input_ids"]
    assert sorted(i for piece in pieces for i in piece[1:-1]) == sorted(whole)


def test_a_limit_counts_pieces():
    assert read(bert(), [Long(words(500))], 8, None, limit=2).size == 96


def test_a_length_beyond_the_models_positions_is_refused():
    with pytest.raises(ValueError, match="positions for 48"):
        read(bert(), ["w1"], 8, 49)


@pytest.mark.parametrize("setting", [{"batch": 0, "length": None}, {"batch": 1, "length": 0}])
def test_settings_below_one_are_refused(setting):
    with pytest.raises(ValueError, match="at least 1"):
        read(bert(), ["w1"], **setting)


def test_the_mask_tells_padding_from_tokens():
    model = bert()
    reading = read(model, [words(5), words(7)], 8, None)
    inputs = collate(model, reading.batches[0])
    assert inputs["attention_mask"].sum(-1).tolist() == [9, 7]
    assert inputs["input_ids"][1, 7:].tolist() == [0, 0]


def test_a_model_without_a_tokenizer_cannot_read_text_but_token_ids():
    model = dataclasses.replace(bert(), processor=None)
    with pytest.raises(ValueError, match="cannot read text"):
        read(model, ["w1"], 8, None)
    assert read(model, [Tokens([2, 5, 3])], 8, None).size == 3


def test_token_ids_that_the_model_does_not_know_are_refused():
    with pytest.raises(ValueError, match="knows 0 to 63"):
        read(bert(), [Tokens([2, 64])], 8, None)


@pytest.mark.parametrize("item", [Image(b""), Sound(torch.zeros(10), 16000)])
def test_a_text_model_does_not_see_or_hear(item):
    model = bert()
    with pytest.raises(ValueError, match=r"has no (image processor|feature extractor)"):
        collate(model, read(model, [item], 8, None).batches[0])


def test_readings_of_other_texts_have_other_digests():
    digests = {read(bert(), [words(9, seed)], 8, None).digest for seed in range(5)}
    digests |= {read(bert(), [Sound(torch.full((3,), float(i)))], 8, None).digest for i in range(3)}
    assert len(digests) == 8


def test_a_tokenizer_with_more_words_than_the_model_is_refused():
    model = bert()
    model.processor.add_tokens(["beyond"])
    for text in ("beyond", Long("w1 beyond")):
        with pytest.raises(ValueError, match="knows 0 to 63"):
            read(model, [text], 8, None)


def test_roberta_has_fewer_places_for_tokens_than_positions():
    from transformers import RobertaConfig, RobertaModel

    model = Checkpoint(RobertaModel(RobertaConfig(**SIZES, max_position_embeddings=34, pad_token_id=1)), bert().processor)
    reading = read(model, [words(50)], 8, None)
    assert reading.length == 32
    model.model(**collate(model, reading.batches[0]))
    with pytest.raises(ValueError, match="positions for 32"):
        read(model, ["w1"], 8, 33)


def test_a_limit_leaves_the_rest_of_a_long_text_untokenised(monkeypatch):
    model = bert()
    monkeypatch.setattr(tokens, "SLICE", 1000)
    text, seen = words(5000), []
    whole = [p for g in read(model, [Long(text)], 8, None).batches for s in g for p in s.item.ids if p > 3]
    assert sorted(whole) == sorted(model.tokenizer(text, add_special_tokens=False)["input_ids"])
    call = type(model.processor).__call__
    monkeypatch.setattr(type(model.processor), "__call__", lambda self, t, **k: (seen.append(len(t)), call(self, t, **k))[1])
    assert read(model, [Long(text)], 8, None, limit=2).size == 96
    assert sum(seen) < 1100


@pytest.mark.parametrize("text", ["", "no end" * 9, "line\nline\n" * 9, " x" * 50, "\n" * 70])
def test_slices_lose_nothing(monkeypatch, text):
    monkeypatch.setattr(tokens, "SLICE", 16)
    assert "".join(tokens._slices(text)) == text


@pytest.mark.parametrize("text", ["w1", Long("w1")])
def test_a_length_that_the_special_tokens_fill_is_refused(text):
    with pytest.raises(ValueError, match="give at least 3"):
        read(bert(), [text], 8, 2)


def test_lists_in_ready_made_inputs_become_tensors():
    model = bert()
    reading = read(model, [model.tokenizer("w1 w2"), dict(model.tokenizer(["w1", "w2"]))], 8, None)
    assert sizes(reading) == [[6], [4]]
    for group in reading.batches:
        model.model(**collate(model, group))


def test_ready_made_inputs_that_make_no_tensor_are_told():
    model = bert()
    with pytest.raises(ValueError, match="padding=True"):
        read(model, [model.tokenizer(["w1 w2", "w3"])], 8, None)
    with pytest.raises(ValueError, match="knows 0 to 63"):
        read(model, [{"input_ids": [[1, 99]]}], 8, None)
