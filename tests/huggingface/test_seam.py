"""The seam: what it sees, what it changes, and that it leaves models as it found them."""

import copy
import warnings
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from heedful.attention import Capture, Mask, Mechanism, Unsupported
from heedful.huggingface import Unreachable, attach, attention_modules, detach, swap, swapped, unswap, watching
from heedful.huggingface.dropout import dropped_softmax
from heedful.mechanisms import Hard, Softmax

from .test_families import answer
from .zoo import BY_NAME

LAYER = "model.layers.1.self_attn"


def case(name="llama", shown=-1) -> tuple[Any, dict[str, Any]]:
    family = BY_NAME[name]
    return family.build(), list(family.inputs())[shown][1]


def implementations(model):
    return [m.config._attn_implementation for m in model.modules() if hasattr(m, "config")]


@pytest.mark.parametrize("name", ["llama", "bert", "whisper", "clip", "t5"])
@pytest.mark.parametrize("former", ["eager", "sdpa"])
def test_everything_is_restored_after_watching(name, former):
    model = BY_NAME[name].build(former if name != "t5" else "eager")
    before, modules, given = implementations(model), dict(model.named_modules()), next(iter(BY_NAME[name].inputs()))[1]
    with torch.no_grad():
        expected = answer(model, given)
        with watching(model, lambda capture: None):
            assert set(implementations(model)) == {"heedful"}
        assert implementations(model) == before, f"{name}: {implementations(model)}"
        assert dict(model.named_modules()) == modules
        assert torch.equal(answer(model, given), expected)


def test_a_failing_watcher_leaves_nothing_behind():
    model, given = case()
    before = implementations(model)

    def fail(capture):
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"), watching(model, fail):
        model(**given)
    seen = []
    assert implementations(model) == before
    with watching(model, seen.append):
        model(**given)
    assert len(seen) == 2


def test_watchers_nest_and_a_part_of_a_model_is_watched_under_its_own_names():
    model, given = case()
    whole, part = [], []
    with watching(model, lambda c: whole.append(c.layer)), watching(model.model, lambda c: part.append(c.layer)):
        model(**given)
    assert whole == ["model.layers.0.self_attn", "model.layers.1.self_attn"]
    assert part == ["layers.0.self_attn", "layers.1.self_attn"]
    assert implementations(model)[0] == "eager"


def test_attach_and_detach_are_idempotent():
    model, _ = case()
    before = implementations(model)
    attach(model)
    attach(model)
    with watching(model, lambda capture: None):
        pass
    assert set(implementations(model)) == {"heedful"}
    detach(model)
    detach(model)
    assert implementations(model) == before


def test_a_capture_tells_scale_cap_sinks_and_which_queries_are_tokens():
    model, given = case("gemma2", 2)
    captures: list[Capture] = []
    with watching(model, captures.append):
        model(**given)
    assert captures[0].cap == 2.0
    assert captures[0].scale == pytest.approx(8**-0.5)
    assert captures[0].real is not None
    assert captures[0].real.tolist() == given["attention_mask"].bool().tolist()
    model, given = case("gpt_oss", 0)
    with watching(model, captures.append):
        model(**given)
    assert captures[-1].null is not None
    assert captures[-1].null.shape == (4,)
    assert captures[-1].real is None


def test_the_queries_of_cross_attention_are_not_judged_by_the_padding_of_its_keys():
    model, given = case("bart", 2)  # equal lengths
    captures: dict[str, Capture] = {}
    with watching(model, lambda capture: captures.update({capture.layer: capture})):
        model(**given)
    assert captures["model.decoder.layers.0.encoder_attn"].mask.keys is not None
    assert captures["model.decoder.layers.0.encoder_attn"].real is None
    assert captures["model.encoder.layers.0.self_attn"].real is not None


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "mistral", "gemma2", "gpt_oss", "deepseek_v3", "t5", "bart"])
def test_gradients_equal_those_of_eager(name):
    model, given = case(name, 1)
    real = next(mask for shown, _, mask in list(BY_NAME[name].inputs())[1:])
    expected = gradients(model, given, real)
    with watching(model, lambda capture: None):
        got = gradients(model, given, real)
    largest = max(gradient.abs().max() for gradient in expected.values())
    for parameter, gradient in expected.items():
        error = (got[parameter] - gradient).abs().max() / largest
        assert error < 2e-6, f"{name}: the gradient of {parameter} differs by {error:.1e}"


def gradients(model, given, real) -> dict[str, torch.Tensor]:
    model.zero_grad()
    out = answer(model, given)[real]
    torch.manual_seed(3)
    (out * torch.randn_like(out)).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", ["bert", "llama", "gemma2", "gpt_oss", "t5"])
def test_bfloat16_and_autocast_work(name):
    model, given = case(name, 1)
    real = list(BY_NAME[name].inputs())[1][2]
    with torch.no_grad():
        expected = answer(model, given)[real]
        with watching(model, lambda capture: None), torch.autocast("cpu", torch.bfloat16):
            automatic = answer(model, given)[real]
        half = copy.deepcopy(model).bfloat16()
        with watching(half, lambda capture: None):
            low = answer(half, given)[real]
    for got in (automatic, low):
        error = (got.float() - expected).abs().mean() / expected.abs().mean()
        assert error < 0.05, f"{name}: bfloat16 differs from float32 by {error:.1%}"


@pytest.mark.parametrize("mechanism", [Hard(), Softmax(beta=2.0)], ids=repr)
def test_a_swapped_mechanism_changes_the_output_and_unswap_restores_it(mechanism):
    model, given = case()
    with torch.no_grad():
        expected, names = answer(model, given), list(model.state_dict())
        swap(model, {LAYER: mechanism})
        assert swapped(model) == {LAYER: mechanism}
        assert dict(model.named_modules())[f"{LAYER}.heedful"] is mechanism
        changed = answer(model, given)
        assert not torch.allclose(changed, expected, atol=1e-3)
        with watching(model, lambda capture: None):
            assert torch.equal(answer(model, given), changed)
        assert torch.equal(answer(model, given), changed), "watching ended the swap"
        unswap(model)
        assert swapped(model) == {}
        assert implementations(model)[0] == "eager"
        assert list(model.state_dict()) == names
        assert torch.equal(answer(model, given), expected)


@dataclass(eq=False)
class Scaled(Mechanism):
    """Softmax with a learned factor per head."""

    supports: ClassVar[frozenset[str]] = frozenset({"causal", "keys"})

    def prepare(self, heads: int, head_dim: int) -> None:
        if not hasattr(self, "factor"):
            self.factor = nn.Parameter(torch.full((heads, 1, 1), 0.5))

    def attend(self, q, k, v, mask: Mask, scale: float):
        return Softmax()(q, k, v, mask, scale) * self.factor


def test_a_swapped_mechanism_trains_and_saves_with_its_model():
    model, given = case("llama", 0)
    swap(model, {LAYER: Scaled()})
    assert model.state_dict()[f"{LAYER}.heedful.factor"].shape == (4, 1, 1)
    answer(model, given).square().sum().backward()
    assert model.get_parameter(f"{LAYER}.heedful.factor").grad.abs().min() > 0


def test_a_mechanism_that_cannot_honour_a_call_says_which_layer():
    model, given = case("mistral", 0)
    swap(model, {LAYER: Scaled()})
    with pytest.raises(Unsupported, match=rf"{LAYER}.*sliding window"):
        model(**given)


def test_an_unknown_layer_is_refused_with_near_names():
    model, _ = case()
    with pytest.raises(ValueError, match=r"'model.layer.1.attn'.*model.layers.1.self_attn"):
        swap(model, {"model.layer.1.attn": Hard()})
    with pytest.raises(ValueError, match="did you mean"):
        unswap(model, ["layers.1"])
    assert implementations(model)[0] == "eager", "a refused swap attached the model"


@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_training_with_attention_dropout_works_and_is_seen(name):
    more = {"attention_probs_dropout_prob": 0.1} if name == "bert" else {"attn_pdrop": 0.1}
    model, given = BY_NAME[name].build("eager", **more).train(), list(BY_NAME[name].inputs())[1][1]
    seen = []
    with watching(model, seen.append):
        answer(model, given).square().sum().backward()
    assert len(seen) == 2
    assert all(p.grad is not None for name, p in model.named_parameters() if "query" in name or "c_attn" in name)


@pytest.mark.parametrize(
    "more",
    [{}, {"mask": Mask(causal=True, window=2)}, {"cap": 1.0}, {"null": torch.zeros(2)}],
    ids=["plain", "window", "cap", "null"],
)
def test_dropped_probabilities_average_to_the_exact_answer(more):
    torch.manual_seed(0)
    q, k, v = (t.expand(6000, -1, -1, -1) for t in torch.randn(3, 1, 2, 4, 3))
    mean = dropped_softmax(Capture("x", q, k, v, **more), 1.0, 0.2).mean(0)
    exact = Softmax()(q[:1], k[:1], v[:1], more.get("mask"), 1.0, cap=more.get("cap"), null=more.get("null"))[0]
    assert (mean - exact).abs().max() < 0.05
    assert not torch.allclose(mean, exact, atol=1e-5), "nothing was dropped"


def test_a_mechanism_without_probabilities_says_that_it_drops_none():
    model = BY_NAME["bert"].build(attention_probs_dropout_prob=0.1).train()
    given = next(iter(BY_NAME["bert"].inputs()))[1]
    swap(model, {"encoder.layer.0.attention.self": Hard()})
    with pytest.warns(UserWarning, match=r"encoder.layer.0.attention.self.*Hard.*dropout of 0.1"):
        model(**given)


def test_gradient_checkpointing_does_not_show_a_call_twice():
    model, given = case("llama", 0)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    seen = []
    with watching(model.train(), seen.append):
        answer(model, given | {"use_cache": False}).sum().backward()
    assert len(seen) == 2


@pytest.mark.parametrize("name", ["llama", "mistral", "bert"])
def test_a_compiled_model_still_passes_the_seam(name):
    model, given = case(name, 1)
    seen = []
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = answer(model, given)
        with watching(model, seen.append):
            got = answer(torch.compile(model, backend="eager"), given)
    assert len(seen) == 2
    real = given["attention_mask"].bool()
    assert (got - expected)[real].abs().max() < 2e-6


@pytest.mark.parametrize("kind", ["dense boolean", "dense additive"])
def test_a_mask_written_out_by_the_user_is_honoured(kind):
    model, given = case("llama", 0)
    ids = given["input_ids"]
    seen = torch.rand(2, 1, ids.shape[1], ids.shape[1]) < 0.6
    seen |= torch.eye(ids.shape[1], dtype=torch.bool)
    additive = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
    with torch.no_grad():
        expected = model(input_ids=ids, attention_mask=additive).logits
        with watching(model, lambda capture: None):
            got = model(input_ids=ids, attention_mask=seen if kind == "dense boolean" else additive).logits
    assert (got - expected).abs().max() < 2e-6


def test_models_without_the_interface_are_named():
    with pytest.raises(Unreachable, match=r"Linear has no attention module"):
        attach(nn.Linear(2, 2))
    with pytest.raises(Unreachable, match=r"MultiheadAttention.*watching_sdpa"):
        attach(nn.TransformerEncoderLayer(8, 2))


def test_wrappers_of_attention_are_not_counted():
    assert list(attention_modules(BY_NAME["bert"].build())) == [f"encoder.layer.{i}.attention.self" for i in range(2)]
    assert "encoder.block.0.layer.0.SelfAttention" in attention_modules(BY_NAME["t5"].build())


def test_a_swap_inside_a_watched_model_outlives_the_watching():
    from models import llama

    from heedful.huggingface import swap, unswap, watching
    from heedful.mechanisms import Softmax

    model, ids = llama().model, torch.arange(3, 20)[None]
    plain = model(ids).logits
    with watching(model, lambda capture: None):
        swap(model.model, {"layers.0.self_attn": Softmax(beta=5.0)})
    sharp = model(ids).logits
    assert not torch.allclose(sharp, plain, atol=1e-4)
    unswap(model.model)
    assert model.config._attn_implementation != "heedful"
    assert torch.equal(model(ids).logits, plain)


def test_a_swap_after_another_implementation_was_chosen_holds_again():
    from models import llama

    from heedful.huggingface import swap
    from heedful.mechanisms import Softmax

    model, ids = llama().model, torch.arange(3, 20)[None]
    swap(model, {"model.layers.0.self_attn": Softmax(beta=5.0)})
    sharp = model(ids).logits
    model.set_attn_implementation("eager")
    swap(model, {"model.layers.1.self_attn": Softmax()})
    assert torch.allclose(model(ids).logits, sharp, atol=1e-5)


def test_a_swap_survives_the_choice_of_another_implementation_and_says_so():
    from models import llama

    model, ids = llama().model, torch.arange(3, 20)[None]
    plain = model(ids).logits
    swap(model, {"model.layers.0.self_attn": Softmax(beta=5.0)})
    sharp = model(ids).logits
    model.set_attn_implementation("eager")
    with pytest.warns(UserWarning, match=r"set_attn_implementation\('eager'\) came after a swap.*unswap"):
        assert torch.allclose(model(ids).logits, sharp, atol=1e-5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(ids)  # once is enough
    unswap(model)
    assert model.config._attn_implementation == "eager"
    assert torch.allclose(model(ids).logits, plain, atol=1e-5)
    assert not model._forward_pre_hooks


def test_a_copy_of_a_swapped_model_is_swapped_too():
    from models import llama

    model, ids = llama().model, torch.arange(3, 20)[None]
    swap(model, {"model.layers.0.self_attn": Softmax(beta=5.0)})
    assert torch.equal(copy.deepcopy(model)(ids).logits, model(ids).logits)
