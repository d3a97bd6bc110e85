"""Growing real models: bit-equal where nothing is learnt, better where the loss says so, with the optimiser's state carried."""

import copy
import math

import pytest
import torch
from huggingface.zoo import BY_NAME
from models import bert, llama, words

import heedful as hd
from heedful.enlarging import enlarge, mean_loss
from heedful.growing import growth_of_batch, measure_growth, model_loss
from heedful.huggingface.adopt import adopt, matrices, sizes_of
from heedful.preserving import preserve
from heedful.widening import Widener

FAMILIES = ("bert", "roberta", "distilbert", "gpt2", "opt", "gpt_neox", "llama", "mistral", "qwen2", "vit", "whisper", "bart", "t5")


def counting(start: int) -> str:
    """A text that can be learnt: words in their order."""
    return " ".join(f"w{(start + i) % 60}" for i in range(30))


TEXTS = [counting(7 * seed) for seed in range(12)]


def sharp_llama():
    model = llama()
    for name, p in model.model.named_parameters():
        if p.ndim == 2 and "embed" not in name:
            p.data.mul_(6)
    return model


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in ("whisper", "bart", "t5")])
def test_growing_without_texts_leaves_every_bit_of_the_output(name):
    """In float32 with eager attention, by multiples of 4: BLAS adds products up by fours, so zeros behind them change no sum; not so in calls of fewer queries than keys."""
    family = BY_NAME[name]
    model = family.build()
    adopt(model)
    larger = hd.grow(model, qk=8).checkpoint.model
    for _, inputs, _ in family.inputs():
        with torch.no_grad():
            assert torch.equal(larger(**inputs)[0], model(**inputs)[0])


@pytest.mark.parametrize("name", FAMILIES)
def test_value_dims_add_zeros_alone(name):
    """W_O sums over more numbers, in another order: the last bits may differ."""
    family = BY_NAME[name]
    model = family.build()
    larger = hd.grow(model, qk=3, v=2).checkpoint.model
    for _, inputs, _ in family.inputs():
        with torch.no_grad():
            torch.testing.assert_close(larger(**inputs)[0], model(**inputs)[0], rtol=1e-4, atol=2e-5)
    before, after = sizes_of(model), sizes_of(larger)
    assert all(
        after[n].qk == tuple(d + 3 for d in own.qk) and after[n].v == tuple(d + 2 for d in own.v) for n, own in before.items()
    )


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "t5"])
def test_a_preserving_layer_can_learn_at_once(name):
    family = BY_NAME[name]
    larger = hd.grow(family.build(), qk=2).checkpoint.model
    _, inputs, _ = next(family.inputs())
    larger(**inputs)[0].square().sum().backward()
    for layer, own in sizes_of(larger).items():
        k = larger.get_submodule(layer).names[1]
        grad = larger.get_submodule(layer).get_submodule(k).weight.grad.view(len(own.qk), own.qk[0], -1)
        assert bool((grad[:, -2:].abs().sum(-1) > 0).all())


@pytest.mark.parametrize("what", ["qk", "v"])
def test_growing_lowers_the_loss_on_texts_that_it_did_not_see(what):
    model = sharp_llama()
    grown = hd.grow(model, TEXTS, **{what: 3}, held=[counting(seed) for seed in (2, 17, 33, 48)])
    search = grown.searches[what]
    assert search.accepted
    assert len(search.tried) <= 6
    assert grown.realised >= 0.25 * grown.predicted > 0
    assert all(change.after != change.before for change in grown.changes)
    assert sum(change.predicted for change in grown.changes) == pytest.approx(grown.predicted)
    assert sizes_of(model.model)["model.layers.0.self_attn"].qk == (8, 8), "the given model stays as it is"


def test_both_kinds_of_dims_grow_one_after_the_other():
    model = sharp_llama()
    grown = hd.grow(model, TEXTS, qk=2, v=2, layers=["model.layers.1.self_attn"])
    sizes = sizes_of(grown.checkpoint.model)
    assert sizes["model.layers.1.self_attn"].qk == (10, 10)
    assert sizes["model.layers.1.self_attn"].v == (10, 10)
    assert sizes["model.layers.0.self_attn"].qk == (8, 8)


@pytest.mark.parametrize("name", ["gpt2", "opt", "gpt_neox"])
def test_a_new_head_lowers_the_loss_trains_and_comes_back(name, tmp_path):
    torch.manual_seed(0)
    model = hd.Checkpoint(BY_NAME[name].build(), llama().processor)
    rows = [[(start + i) % 50 + 5 for i in range(30)] for start in range(0, 60, 5)]
    grown = hd.grow(model, rows, heads=1, held=rows[::3])
    assert grown.searches["heads"].accepted
    larger = grown.checkpoint.model
    assert all(own.heads == len(own.qk) == 5 for own in sizes_of(larger).values())
    grown.checkpoint.save(tmp_path / "larger")
    ids = torch.tensor(rows[:2])
    torch.testing.assert_close(hd.load(tmp_path / "larger").model(ids).logits, larger(ids).logits, rtol=1e-4, atol=1e-4)
    written = larger.generate(ids[:, :5], max_new_tokens=4, do_sample=False)
    assert torch.equal(written, larger.generate(ids[:, :5], max_new_tokens=4, do_sample=False, use_cache=False))


def test_a_head_whose_step_is_not_taken_changes_nothing_and_carries_the_optimiser():
    model = BY_NAME["gpt2"].build()
    ids = torch.tensor([[(start + i) % 50 + 5 for i in range(30)] for start in range(0, 60, 5)])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-6)
    model(ids, labels=ids).loss.backward()
    optimizer.step()
    growths = measure_growth(model, ids.tolist()).layers
    before = model(ids).logits
    losses = iter([1.0, *[2.0] * 9])
    changes, searches = enlarge(model, growths, {"heads": dict.fromkeys(growths, 1)}, lambda: next(losses), optimizer)
    assert not searches["heads"].accepted
    assert all(change.after.heads == 5 for change in changes)
    torch.testing.assert_close(model(ids).logits, before, rtol=1e-4, atol=1e-4)
    assert all(p.shape == x.shape for p, held in optimizer.state.items() for x in held.values() if getattr(x, "ndim", 0))
    optimizer.step()


@pytest.mark.parametrize("name, said", [("llama", "share 2 key heads"), ("t5", "learned bias")])
def test_heads_that_are_not_free_are_not_added(name, said):
    model = BY_NAME[name].build()
    with pytest.raises(ValueError, match=said):
        enlarge(model, {}, {"heads": dict.fromkeys(sizes_of(model), 1)}, lambda: 1.0)


def test_a_step_that_does_not_bring_what_it_should_is_not_taken():
    model = sharp_llama()
    growths = measure_growth(model, TEXTS).layers

    def backwards(one: Widener, what: str, count: int):
        step = one.qk(count)
        return type(step)(-step.left, step.right, step.slope, step.judged, step.damping, step.kept, step.idle)

    inputs = [{"input_ids": torch.tensor([model.tokenizer(TEXTS[0])["input_ids"]])}]
    changed = copy.deepcopy(model.model)
    wanted = {"qk": dict.fromkeys(growths, 2)}
    changes, searches = enlarge(changed, growths, wanted, lambda: mean_loss(changed, inputs, model_loss), choose=backwards)
    assert not searches["qk"].accepted
    assert all(math.isnan(change.damping) for change in changes)
    changed.set_attn_implementation("eager")
    model.model.set_attn_implementation("eager")
    assert torch.equal(changed(**inputs[0]).logits, model.model(**inputs[0]).logits)


def test_a_grown_model_comes_back_from_its_folder(tmp_path):
    grown = hd.grow(sharp_llama(), TEXTS, qk=3, v=1).checkpoint
    grown.save(tmp_path / "larger")
    back = hd.load(tmp_path / "larger")
    ids = torch.tensor([grown.tokenizer(TEXTS[0])["input_ids"]])
    assert torch.equal(back.model(ids).logits, grown.model(ids).logits)
    assert back.plan == grown.plan


def test_a_plan_may_ask_for_larger_heads():
    model = llama()
    plan = hd.Plan({"model.layers.0.self_attn": hd.Resize(qk=(10, 12), v=4), "model.layers.1.self_attn": hd.Resize(v=9)})
    larger = hd.apply(model, plan)
    sizes = sizes_of(larger.model)
    assert sizes["model.layers.0.self_attn"].qk == (10, 12)
    assert sizes["model.layers.0.self_attn"].v == (4, 4)
    assert sizes["model.layers.1.self_attn"].v == (9, 9)
    assert larger.plan is not None
    again = hd.apply(model, larger.plan)
    assert sizes_of(again.model) == sizes
    only = hd.apply(model, hd.Plan({"model.layers.0.self_attn": hd.Resize(qk=11)}))
    ids = torch.arange(4, 20)[None]
    torch.testing.assert_close(only.model(ids).logits, model.model(ids).logits)


OPTIMIZERS = {
    "Adam": lambda groups: torch.optim.Adam(groups, lr=1e-3),
    "AdamW": lambda groups: torch.optim.AdamW(groups, lr=1e-3, amsgrad=True),
    "SGD": lambda groups: torch.optim.SGD(groups, lr=1e-2, momentum=0.9),
}


@pytest.mark.parametrize("name", ["bert", "gpt2", "gpt_neox", "llama"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_training_goes_on_as_if_nothing_had_grown(name, kind):
    family = BY_NAME[name]
    runs = []
    for grows in (False, True):
        model = family.build(attention="eager")
        _, inputs, _ = next(family.inputs())
        matrices_of = [p for p in model.parameters() if p.ndim == 2]
        others = [p for p in model.parameters() if p.ndim != 2]
        optimizer = OPTIMIZERS[kind]([{"params": matrices_of, "weight_decay": 1e-3}, {"params": others, "weight_decay": 0.0}])
        for step in range(4):
            if grows and step == 3:
                preserve(model, {"qk": dict.fromkeys(sizes_of(model), 2)}, optimizer)
            optimizer.zero_grad()
            model(**inputs)[0].square().mean().backward()
            optimizer.step()
        runs.append((model, optimizer))
    (plain, one), (larger, other) = runs
    for layer, own in sizes_of(plain).items():
        kept = matrices(larger, layer).q.view(own.heads, own.qk[0] + 2, -1)[:, : own.qk[0]] if layer else None
        before = _read(plain, layer).q.reshape(own.heads, own.qk[0], -1)
        assert torch.allclose(kept, before, rtol=1e-5, atol=1e-7)
    assert [g["weight_decay"] for g in other.param_groups] == [g["weight_decay"] for g in one.param_groups]
    taught = {id(p) for g in other.param_groups for p in g["params"]}
    assert taught == {id(p) for p in larger.parameters()}
    assert all(p.shape == x.shape for p, held in other.state.items() for x in held.values() if getattr(x, "ndim", 0))
    order = [id(p) for p in larger.parameters() if p.ndim == 2]
    assert [id(p) for p in other.param_groups[0]["params"]] == order


def _read(model, layer):
    from heedful.huggingface.adopt import of_layer

    return of_layer(model, layer)[1]


def test_new_moments_are_zero_and_steps_go_on():
    model = BY_NAME["gpt2"].build()
    _, inputs, _ = next(BY_NAME["gpt2"].inputs())
    optimizer = torch.optim.Adam(model.parameters())
    model(**inputs)[0].square().mean().backward()
    optimizer.step()
    fused = optimizer.state[model.transformer.h[0].attn.c_attn.weight]["exp_avg"][:, 32:64].mT.clone()  # that of the keys
    preserve(model, {"qk": dict.fromkeys(sizes_of(model), 2)}, optimizer)
    state = optimizer.state[model.transformer.h[0].attn.k_proj.weight]
    assert state["step"] == 1
    moments = state["exp_avg"].view(4, 10, 32)
    assert torch.equal(moments[:, :8].reshape(32, 32), fused)
    assert not moments[:, 8:].any()


def test_an_encoder_without_a_loss_says_what_to_give():
    with pytest.raises(ValueError, match="give loss="):
        hd.grow(bert(), TEXTS, qk=2)

    def small(model, inputs):
        found = model(**inputs).last_hidden_state
        return found.square().sum(), found.shape[0] * found.shape[1]

    assert hd.grow(bert(), TEXTS, qk=2, loss=small).checkpoint.model.encoder.layer[0].attention.self.key.out_features == 40


@pytest.mark.parametrize(
    "options, said",
    [
        ({}, "nothing is asked for"),
        ({"qk": -1}, "at least 1"),
        ({"heads": 1}, "by texts"),
        ({"qk": 2, "texts": [words(4), words(5)]}, "too few"),
        ({"qk": 2, "layers": ["nowhere"]}, "nowhere"),
        ({"qk": 2, "texts": TEXTS[:1]}, "at least 2"),
    ],
)
def test_what_cannot_grow_is_refused(options, said):
    with pytest.raises((ValueError, KeyError), match=said):
        hd.grow(llama(), **options)


def test_statistics_of_two_folds_add_up():
    model = sharp_llama()
    ids = [torch.tensor([model.tokenizer(t)["input_ids"]]) for t in TEXTS[:2]]
    parts = [growth_of_batch(model.model, {"input_ids": one}, model_loss, fold) for fold, one in enumerate(ids)]
    whole = measure_growth(model, TEXTS[:2]).layers
    for name, growth in whole.items():
        assert torch.allclose((parts[0][name] + parts[1][name]).logit_gradient, growth.logit_gradient, rtol=1e-6, atol=1e-9)
