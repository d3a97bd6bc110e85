"""Mechanisms, lengths and sizes from words."""

import pytest

from heedful import spec
from heedful.benching.recurrent import Recurrent
from heedful.mechanisms import Performer


def test_mechanisms_are_named_with_their_settings():
    one, other = spec.mechanisms(" Performer(features=128, directions='iid') , Softmax")
    assert isinstance(one, Performer)
    assert (one.features, one.directions) == (128, "iid")
    assert repr(other) == "Softmax(beta=1.0)"


def test_more_kinds_may_be_named():
    assert isinstance(spec.mechanisms("Recurrent", (Recurrent,))[0], Recurrent)


@pytest.mark.parametrize(
    "text, said",
    [
        ("Nope", "there is no mechanism 'Nope'; known are Softmax"),
        ("Performer(feature=3)", "Performer has no setting 'feature'; it has features, directions, seed"),
        ("Performer(3)", "name it and its settings"),
        ("Performer(**{'features': 3})", "Performer has no setting 'None'"),
        ("Performer(features=open('x'))", "must be plain data"),
        ("Performer(features=0)", "features is 0"),
        ("__import__('os').system('true')", "is no mechanism"),
        ("Softmax; Performer", "cannot be read"),
        ("Softmax] + [Performer", "cannot be read"),
        ("Performer(", "cannot be read"),
        ("3", "is no mechanism"),
    ],
)
def test_what_names_no_mechanism_is_told(text, said):
    with pytest.raises(ValueError, match=said.replace("(", r"\(")):
        spec.mechanisms(text)


@pytest.mark.parametrize(
    "text, found",
    [
        ("512..4096", (512, 1024, 2048, 4096)),
        ("512..3000", (512, 1024, 2048, 3000)),
        ("512..512", (512,)),
        ("512, 8192", (512, 8192)),
        ("100", (100,)),
    ],
)
def test_lengths_are_listed_or_doubled(text, found):
    assert spec.lengths(text) == found


@pytest.mark.parametrize("text", ["", "many", "0..8", "512..256", "512-1024", "-5"])
def test_other_lengths_are_refused(text):
    with pytest.raises(ValueError, match="lengths"):
        spec.lengths(text)


@pytest.mark.parametrize("text, found", [("4GB", 4e9), ("1.5mb", 1.5e6), ("300", 300), ("2 G", 2e9), (77, 77)])
def test_sizes_have_units(text, found):
    assert spec.size(text) == found


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "4 apples", "1e9"])
def test_other_sizes_are_refused(text):
    with pytest.raises(ValueError, match="no size in memory"):
        spec.size(text)
