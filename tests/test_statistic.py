"""Statistics add up, and what they say about their own errors is true."""

import pytest
import torch
from models import llama, words

from heedful import Capture, scan
from heedful.attention import Mask
from heedful.statistics import Entropy, Evenness, KeySensitivity, Load, QuerySensitivity, ValueSensitivity

LAYER = "model.layers.1.self_attn"


def captured(texts: int, tokens: int, sample: torch.Tensor | None, real: torch.Tensor | None = None, seed: int = 0) -> Capture:
    q, k, v = torch.randn(3, texts, 2, tokens, 8, generator=torch.Generator().manual_seed(seed))
    return Capture("0", q, k, v, Mask(causal=True, keys=real), sample=sample, real=real)


def test_errors_are_those_of_repeated_scans_though_the_texts_of_a_batch_share_their_positions():
    """What depends on the position errs alike in every text of a batch."""
    model, texts, kinds = llama(positions=512), [words(298, i) for i in range(8)], (Entropy, ValueSensitivity)
    found = [scan(model, texts, 24, batch=8, length=300, seed=seed, statistics=kinds).results()[LAYER] for seed in range(30)]
    for column in ("entropy", "value_sensitivity"):
        spread = torch.stack([f[column].value for f in found]).std(0)
        told = torch.stack([f[column].error for f in found]).mean(0)
        assert ((told / spread > 0.6) & (told / spread < 1.6)).all(), (column, told / spread)


@pytest.mark.parametrize("kind", [Entropy, Evenness, ValueSensitivity, KeySensitivity])
def test_one_text_errs_as_the_textbook_says(kind):
    sample = torch.arange(0, 60, 5)
    call = captured(1, 60, sample)
    x = {Entropy: call.rows.entropy, ValueSensitivity: call.rows.squared, KeySensitivity: call.rows.moved}.get(kind)
    x = (call.rows.entropy / call.rows.visible.clamp_min(2).log() if x is None else x).double()[0]
    n = len(sample)
    assert torch.allclose(kind.of(call).variance, 60**2 * x.var(-1) / n * (1 - n / 60), rtol=1e-6)


def test_two_texts_alike_err_twice_as_far_as_one():
    sample = torch.arange(0, 60, 5)
    one = captured(1, 60, sample)
    q, k, v = (t.expand(2, -1, -1, -1) for t in (one.q, one.k, one.v))
    two = Capture("0", q, k, v, one.mask, sample=sample)
    assert torch.allclose(Entropy.of(two).variance, 4 * Entropy.of(one).variance)


def test_texts_of_two_batches_err_apart():
    parts = [Entropy.of(captured(1, 60, torch.arange(i, 60, 5), seed=i)) for i in range(3)]
    whole = parts[0] + parts[1] + parts[2]
    assert torch.allclose(whole.variance, torch.stack([p.variance for p in parts]).sum(0))
    assert torch.allclose(whole.mean, torch.stack([p.mean for p in parts]).mean(0))


@pytest.mark.parametrize("sample, what", [([10, 90], "nan"), ([80, 90], "nothing"), ([10, 20], "an error")])
def test_one_sampled_row_gives_no_honest_error_and_none_no_weight(sample, what):
    """Of 100 places 60 are tokens."""
    real = (torch.arange(100) < 60)[None]
    found = Entropy.of(captured(1, 100, torch.tensor(sample), real))
    assert bool(found.error.isnan().all()) == (what != "an error")
    assert found.weight.item() == (0 if what == "nothing" else 60)
    assert found.variance.nan_to_num(1).gt(0).all() or what == "nothing"


@pytest.mark.parametrize("kind", [Entropy, ValueSensitivity, KeySensitivity, QuerySensitivity])
def test_a_text_of_one_token_is_known_without_error(kind):
    assert (kind.of(captured(2, 1, None)).variance == 0).all()


def test_the_busiest_key_of_a_sample_is_picked_by_luck_so_it_has_no_error():
    whole, some = (Load.of(captured(2, 60, sample)) for sample in (None, torch.arange(0, 60, 5)))
    assert (whole.result()["busiest"].error == 0).all()
    assert some.result()["busiest"].error.isnan().all()
    assert (whole + some).result()["busiest"].error.isnan().all()
    assert "at most" in Load.columns["busiest"]


def test_the_busiest_key_of_samples_is_at_least_as_busy_on_average():
    found = [Load.of(captured(1, 60, torch.randperm(60, generator=torch.Generator().manual_seed(i))[:12])) for i in range(30)]
    mean = torch.stack([f.result()["busiest"].value for f in found]).mean(0)
    assert (mean > Load.of(captured(1, 60, None)).result()["busiest"].value).all()
