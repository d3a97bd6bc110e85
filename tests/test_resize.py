"""Resizing: full sizes change nothing, fewer dims lose what is predicted, and what cannot be is refused before work starts."""

import copy

import pytest
import torch
from huggingface.zoo import BY_NAME
from models import bert, llama, words

import heedful as hd
from heedful.huggingface.layer import Resized
from heedful.plan import Native
from heedful.rules import Budget, Tolerance

TEXTS = [words(40, i) for i in range(12)]
LAYERS = ["encoder.layer.0.attention.self", "encoder.layer.1.attention.self"]


def hidden(checkpoint, text=TEXTS[3]):
    ids = torch.tensor([checkpoint.tokenizer(text)["input_ids"]])
    with torch.no_grad():
        return checkpoint.model(ids, output_hidden_states=True).hidden_states[-1]


def test_full_sizes_change_nothing_but_biases_that_do_not_matter():
    for made in (bert(), llama()):
        most = 8
        found = hd.shrink(made, TEXTS, qk=most, v=most)
        off = (hidden(found.checkpoint) - hidden(made)).norm() / hidden(made).norm()
        assert off < 1e-6
        assert all(c.predicted.logits < 1e-6 and c.measured.output < 1e-6 for c in found.changes)


def test_the_given_model_stays_as_it_is():
    made = bert()
    before = made.fingerprint
    hd.shrink(made, TEXTS, qk=4, v=4)
    assert made.fingerprint == before
    assert made.plan is None


def test_what_is_predicted_is_what_the_logits_lose_on_the_same_texts():
    """Against the layer's own q and k before and after, over all pairs of a query of one token and a key of another."""
    made = bert()
    for p in made.model.parameters():
        p.data.mul_(6 if p.ndim == 2 else 1)
    found = hd.shrink(made, TEXTS, qk=5, held=TEXTS)
    before, after = (hd.capture(m, TEXTS, layers=LAYERS[:1], batch=1)[LAYERS[0]] for m in (made, found.checkpoint))

    def gram(calls):
        rows = [(c.q[0].double() * c.scale, c.k[0].double() - c.k[0].double().mean(1, keepdim=True)) for c in calls]
        q, k = (torch.cat([row[i] for row in rows], 1) for i in (0, 1))
        return q @ k.mT

    own, other = gram(before), gram(after)
    lost = ((own - other).square().sum() / own.square().sum()).sqrt()
    change = found.changes[0]
    assert change.measured.logits == pytest.approx(float(lost), rel=1e-3)
    assert 0 < change.predicted.logits == pytest.approx(float(lost), rel=1e-3)


def test_data_tell_better_dims_than_weights():
    made = bert()
    for p in made.model.parameters():
        p.data.mul_(6 if p.ndim == 2 else 1)
    made.model.embeddings.word_embeddings.weight.data[:, 8:] *= 0.02  # inputs far from white
    by_data = hd.shrink(made, TEXTS, qk=4, held=TEXTS).checkpoint
    by_weights = hd.apply(made, hd.Plan({name: hd.Resize(qk=4) for name in LAYERS}))
    exact = hidden(made)
    assert (hidden(by_data) - exact).norm() < (hidden(by_weights) - exact).norm()


@pytest.mark.parametrize("name", ["llama", "gpt_neox", "qwen2"])
def test_rotary_layers_drop_whole_frequency_pairs(name):
    model = BY_NAME[name].build("sdpa").double()
    texts = [torch.randint(3, 60, (40,), generator=torch.Generator().manual_seed(i)).tolist() for i in range(12)]
    found = hd.shrink(model, texts, qk=Budget(0.5), v=Budget(0.5))
    for change in found.changes:
        assert change.after.pairs is not None
        assert all(2 * len(kept) <= dims for kept, dims in zip(change.after.pairs, change.after.qk, strict=True))
        assert set(change.after.pairs[0]) <= set(change.before.pairs[0])
    before, after = (
        sum(map(sum, ((*c.qk, *c.v) for c in side))) for side in zip(*((c.before, c.after) for c in found.changes), strict=True)
    )
    assert 0.4 * before <= after <= 0.5 * before


def test_alike_heads_of_a_layer_have_one_size():
    found = hd.shrink(bert(), TEXTS, qk=Budget(0.6, alike=True))
    assert all(len(set(c.after.qk)) == 1 for c in found.changes)


def test_a_tolerance_is_kept_on_the_texts_it_saw():
    found = hd.shrink(bert(), TEXTS, qk=Tolerance(0.05), v=Tolerance(0.05))
    assert all(c.predicted.logits**2 <= 0.05 and c.predicted.output**2 <= 0.05 for c in found.changes)
    assert any(c.after.qk < c.before.qk for c in found.changes)


def test_growing_position_free_dims_behind_rotary_ones_is_exact_where_keys_are_zero():
    from heedful.huggingface.adopt import adopt, matrices, reshape
    from heedful.huggingface.layer import Sizes

    model = BY_NAME["llama"].build("sdpa").double()
    other = copy.deepcopy(model)
    ids = torch.arange(3, 12)[None]
    for name, module in adopt(other).items():
        old, found = module.sizes, matrices(other, name)
        q = torch.cat([torch.cat([x, torch.randn(3, 32).double()]) for x in found.q.split(8)])
        k = torch.cat([torch.cat([x, torch.zeros(3, 32).double()]) for x in found.k.split(8)])
        reshape(other, name, type(found)(q, k, found.v, found.o), Sizes(4, (11, 11), old.v, old.pairs))
    torch.testing.assert_close(other(ids).logits, model(ids).logits, atol=1e-12, rtol=0)


@pytest.mark.parametrize(
    "given, said",
    [
        ({}, "nothing is asked for"),
        ({"qk": 0}, "qk is 0, but heads of .* have 8 dims"),
        ({"v": 9}, "v is 9, but heads of .* have 8 dims; to shrink them give 1 to 8"),
    ],
)
def test_sizes_that_cannot_be_are_refused(given, said):
    with pytest.raises(ValueError, match=said):
        hd.shrink(bert(), TEXTS, **given)


def test_odd_sizes_of_rotary_heads_are_refused():
    for ask in (
        lambda: hd.shrink(llama(), TEXTS, qk=3),
        lambda: hd.apply(llama(), hd.Plan({"model.layers.0.self_attn": hd.Resize(qk=(4, 3))})),
    ):
        with pytest.raises(ValueError, match="turn in 4 frequency pairs; give an even number up to 8"):
            ask()


def test_resized_models_are_not_taken_apart_wrongly():
    from heedful.huggingface.blocks import Undecomposable, blocks

    with pytest.raises(Undecomposable, match=r"model.layers.0.self_attn of this LlamaForCausalLM was resized"):
        blocks(hd.shrink(llama(), TEXTS, qk=4).checkpoint.model)


def test_too_few_texts_say_how_many_tokens_are_needed():
    with pytest.raises(ValueError, match=r"tokens were read, too few for .*need 128 \(16 for each dim\)"):
        hd.shrink(bert(), [words(9), words(9, 1)], qk=4)
    with pytest.raises(ValueError, match="give at least 2, or others to measure on"):
        hd.shrink(bert(), TEXTS[:1], qk=4)


def test_weights_that_are_not_finite_are_told():
    made = bert()
    made.model.encoder.layer[1].attention.self.key.weight.data[0, 0] = torch.nan
    with pytest.raises(ValueError, match=r"encoder.layer.1.attention.self"):
        hd.shrink(made, TEXTS, qk=4)


class Scaled(torch.nn.Linear):
    def forward(self, x):
        return 1.1 * super().forward(x)


def test_a_model_that_computes_more_than_its_family_is_refused():
    made = bert()
    made.model.encoder.layer[1].attention.self.__class__ = type("Odd", (type(made.model.encoder.layer[1].attention.self),), {})
    with pytest.raises(ValueError, match="is a Odd, whose matrices are not known"):
        hd.shrink(made, TEXTS, qk=4)
    made = BY_NAME["gpt2"].build("sdpa")
    made.transformer.h[0].attn.c_attn.register_forward_hook(lambda module, args, output: 2 * output)
    with pytest.raises(ValueError, match=r"transformer.h.0.attn of GPT2LMHeadModel has another q than its family's table says"):
        hd.apply(made, hd.Plan({"transformer.h.0.attn": hd.Resize(qk=4)}))


def test_a_plan_is_readable_and_comes_back(tmp_path):
    found = hd.shrink(llama(), TEXTS, qk=Budget(0.5)).checkpoint
    plan = found.plan
    again = hd.Plan.load(plan.save(tmp_path / "plan.json"))
    assert again == plan
    text = plan.to_json()
    assert '"schema": 1' in text
    assert '"model.layers.0.self_attn": {"resize": {"qk":' in text


def test_a_plan_for_another_model_is_refused_before_anything_changes():
    plan = hd.shrink(llama(), TEXTS, qk=4).checkpoint.plan
    with pytest.raises(ValueError, match=r"another model \(llama, not bert\)"):
        hd.apply(bert(), plan)
    for layers, natives, said in (
        ({"encoder.layer.7.attention.self": hd.Resize(qk=4)}, {}, "no attention layer .*did you mean encoder.layer"),
        ({LAYERS[0]: hd.Resize(qk=4)}, {LAYERS[0]: Native(12, 12, 64, 64)}, "was Native.heads=12.* is Native.heads=4"),
        ({LAYERS[0]: hd.Resize(qk=(4, 4))}, {}, "qk has 2 sizes, but there are 4 key heads"),
        ({LAYERS[0]: hd.Resize(v=0)}, {}, "v is 0; a head has at least 1 dim"),
        ({LAYERS[0]: hd.Resize(qk=4, pairs=((0,),) * 4)}, {}, "a rotary layer needs them"),
    ):
        made = bert()
        with pytest.raises(ValueError, match=said):
            hd.apply(made, hd.Plan(layers, natives))
        assert not any(isinstance(m, Resized) for m in made.model.modules())


@pytest.mark.parametrize(
    "text, said", [("{", "damaged"), ('{"schema": 9}', "schema 9"), ('{"schema": 1, "layers": {"a": {"resize": {"w": 1}}}}', "'w'")]
)
def test_damaged_plans_are_told(text, said):
    with pytest.raises(ValueError, match=said):
        hd.Plan.of_json(text)
