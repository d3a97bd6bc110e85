"""What a scan may be given to read."""

import json
import wave

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image as pillow

from heedful.texts import Image, Long, Sound, Tokens, items


def test_a_list_of_texts_is_read_without_the_empty_ones():
    assert items(["one", "", "  \n", "two"]) == ["one", "two"]


def test_a_limit_stops_early():
    assert items((f"text {i}" for i in range(10**9)), limit=2) == ["text 0", "text 1"]


@pytest.mark.parametrize("nothing", [[], ["", "  "]])
def test_nothing_to_read_is_an_error(nothing):
    with pytest.raises(ValueError, match="nothing to scan"):
        items(nothing)


def test_a_text_file_is_one_long_text(tmp_path):
    (tmp_path / "a.txt").write_text("line one\nline two", "utf-8")
    assert items(tmp_path / "a.txt") == [Long("line one\nline two")]


def test_an_empty_text_file_is_nothing_to_read(tmp_path):
    (tmp_path / "a.txt").write_text(" \n")
    with pytest.raises(ValueError, match="nothing to scan"):
        items(tmp_path / "a.txt")


def test_a_text_file_of_another_encoding_is_named(tmp_path):
    (tmp_path / "a.txt").write_bytes("café".encode("latin-1"))
    with pytest.raises(ValueError, match=r"a.txt is not UTF-8"):
        items(tmp_path / "a.txt")


def test_json_lines_hold_strings_objects_and_token_ids(tmp_path):
    lines = ["a string", {"text": "its text", "title": "not this"}, {"only": "one string", "label": 3}, {"input_ids": [5, 6]}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    *texts, tokens = items(tmp_path / "a.jsonl")
    assert texts == ["a string", "its text", "one string"]
    assert tokens == Tokens([5, 6])


@pytest.mark.parametrize(
    "line",
    ["{not json", '{"a": "x", "b": "y"}', "17", "[]", "[1.5]", '{"input_ids": ["a"]}', '{"input_ids": []}', '{"input_ids": [1.5]}'],
)
def test_a_bad_json_line_is_named_by_its_number(tmp_path, line):
    (tmp_path / "a.jsonl").write_text('"good"\n' + line)
    with pytest.raises(ValueError, match=r"line 2.* holds no|line 2 is not JSON"):
        items(tmp_path / "a.jsonl")


@pytest.mark.parametrize("columns", [{"text": ["a", "b"], "title": ["x", "y"]}, {"review": ["a", "b"], "label": [0, 1]}])
def test_parquet_gives_its_text_column_or_the_only_strings(tmp_path, columns):
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    assert items(tmp_path / "a.parquet") == ["a", "b"]


def test_parquet_with_two_string_columns_asks_which(tmp_path):
    pq.write_table(pa.table({"one": ["a"], "two": ["b"]}), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match="name the one to read"):
        items(tmp_path / "a.parquet")


def test_a_damaged_parquet_file_is_named(tmp_path):
    (tmp_path / "a.parquet").write_bytes(b"PAR1 and then nothing")
    with pytest.raises(ValueError, match=r"a.parquet is damaged"):
        items(tmp_path / "a.parquet")


def test_parquet_gives_images_as_bytes_or_as_hugging_face_stores_them(tmp_path):
    pillow.new("RGB", (4, 4), "red").save(tmp_path / "red.png")
    raw = (tmp_path / "red.png").read_bytes()
    for name, column in (("a.parquet", [raw]), ("b.parquet", [{"bytes": raw, "path": "red.png"}])):
        pq.write_table(pa.table({"image": column, "label": [1]}), tmp_path / name)
        (image,) = items(tmp_path / name)
        assert isinstance(image, Image)
        assert image.open().getpixel((0, 0)) == (255, 0, 0)


def test_a_folder_is_read_in_order_of_its_names(tmp_path):
    (tmp_path / "b.txt").write_text("second")
    (tmp_path / "a.jsonl").write_text('"first"')
    (tmp_path / "notes.md").write_text("not read")
    assert items(tmp_path) == ["first", Long("second")]


def test_a_folder_without_texts_says_what_is_read(tmp_path):
    with pytest.raises(ValueError, match=r"\.txt, \.jsonl, \.parquet"):
        items(tmp_path)


def test_a_path_that_is_not_there_is_no_text():
    with pytest.raises(ValueError, match=r"give a list: \[text\]"):
        items("no such file.txt")


def test_a_file_of_another_kind_is_refused(tmp_path):
    (tmp_path / "a.pdf").write_text("x")
    with pytest.raises(ValueError, match="no kind that is read here"):
        items(tmp_path / "a.pdf")


def test_waves_are_read_as_mono_floats(tmp_path):
    with wave.open(str(tmp_path / "a.wav"), "wb") as file:
        file.setnchannels(2)
        file.setsampwidth(2)
        file.setframerate(16000)
        file.writeframes(torch.tensor([[16384, 0], [-16384, -16384]], dtype=torch.int16).numpy().tobytes())
    (sound,) = items(tmp_path / "a.wav")
    assert isinstance(sound, Sound)
    assert sound.rate == 16000
    assert sound.wave.tolist() == [0.25, -0.5]


def test_values_are_told_by_their_type():
    picture = pillow.new("RGB", (2, 2))
    found = items([[1, 2, 3], torch.tensor([4, 5]), torch.zeros(8), picture, {"input_ids": torch.ones(1, 2)}])
    assert [type(x).__name__ for x in found] == ["Tokens", "Tokens", "Sound", "Image", "dict"]


@pytest.mark.parametrize("bad", [[3.5], [torch.zeros(2, 2)], 17, {"input_ids": [1]}])
def test_what_cannot_be_read_is_refused(bad):
    with pytest.raises(ValueError, match=r"give|needed"):
        items(bad)


def test_a_list_of_paths_gives_all_that_each_holds(tmp_path):
    (tmp_path / "a.jsonl").write_text('"one"\n"two"\n')
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "b.txt").write_text("three")
    paths = [tmp_path / name for name in ("a.jsonl", "empty.jsonl", "b.txt")]
    assert items([*paths, "four"]) == ["one", "two", Long("three"), "four"]
    with pytest.raises(ValueError, match="nothing to scan"):
        items([tmp_path / "empty.jsonl"])
