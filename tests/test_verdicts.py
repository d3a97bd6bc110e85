"""Verdicts are sentences with true numbers."""

import pytest
import torch
from models import llama, words

from heedful import Capture, Findings, scan
from heedful.about import About, Layer
from heedful.attention import Mask
from heedful.statistics import ALL
from heedful.verdicts import verdicts


def findings(q: torch.Tensor, k: torch.Tensor, rows: int | None = None, **mask) -> Findings:
    """Findings of one layer `0` with these queries and keys."""
    heads, tokens, dim = q.shape[1:]
    sample = None if rows is None else torch.randperm(tokens)[:rows].sort().values
    capture = Capture("0", q, k, k, Mask(**mask), out=q, sample=sample)
    about = About("made up", "", 1, tokens, 0, tokens, tokens, rows, layers={"0": Layer(heads, heads, dim, dim)})
    return Findings(about, {"0": {s.__name__: s.of(capture) for s in ALL}})


def test_heads_that_park_on_the_first_token_are_counted_and_named():
    q, k = torch.zeros(1, 3, 64, 4), torch.zeros(1, 3, 64, 4)
    q[:, 1], k[:, 1, 0] = 3.0, 3.0
    (said,) = (v for v in verdicts(findings(q, k)) if "first token" in v)
    assert said.startswith("1 of 3 heads puts over half of their mass on the first token")
    assert said.endswith("L0.H1.")


def test_heads_that_look_everywhere_are_named():
    said = " ".join(verdicts(findings(torch.zeros(1, 2, 8, 4), torch.zeros(1, 2, 8, 4))))
    assert "2 of 2 heads look at all keys nearly alike" in said
    assert "L0.H0, L0.H1" in said


def test_windows_are_named_only_for_long_texts():
    said = [" ".join(verdicts(findings(*torch.zeros(2, 1, 2, n, 4), causal=True, window=16))) for n in (40, 128)]
    assert ["less than 16 tokens away" in text for text in said] == [False, True]


def test_idle_dims_are_counted():
    q = torch.randn(1, 2, 256, 8)
    q[..., 2:] = 0
    assert any("fits in 4 of 16 key dims (75 % spare)" in v for v in verdicts(findings(q, torch.randn(1, 2, 256, 8))))


def test_sampling_is_owned_up_to():
    q, k = torch.randn(2, 1, 2, 64, 8)
    assert any("rest on 8 query rows" in v for v in verdicts(findings(q, k, rows=8)))
    assert not any("query rows" in v for v in verdicts(findings(q, k)))


@pytest.mark.parametrize("alike, said", [(True, "tokens have become nearly alike: rank collapse"), (False, "no rank collapse")])
def test_rank_collapse_is_told(alike, said):
    model = llama()
    if alike:
        with torch.no_grad():
            model.model.model.embed_tokens.weight[:] = model.model.model.embed_tokens.weight[5]
    assert any(said in verdict for verdict in scan(model, [words(20)]).verdicts())


def test_no_verdict_carries_a_nan():
    said = scan(llama(), [words(100, 3), words(1)], rows=10, length=128).verdicts()
    assert said
    assert not any("nan" in verdict for verdict in said)


def test_figures_from_too_few_rows_to_tell_their_error_say_so():
    said = verdicts(findings(*torch.randn(2, 1, 2, 64, 4), rows=1))
    assert any("rest on 1 query row of each longer text: how exact they are, so few rows do not tell" in text for text in said)
