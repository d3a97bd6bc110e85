"""A swapped model runs from tokens to gradients with every mechanism, or refuses with the name of one that would do."""

import json
import re

import pytest
import torch
from contracts.test_mechanisms import SETTINGS

import heedful as hd
from heedful.huggingface import attention_modules, swapped
from heedful.mechanisms import ALL, from_settings

from .zoo import BY_NAME, WORDS

pytestmark = pytest.mark.filterwarnings("ignore:Performer")

NEEDS = {"bert": {"keys"}, "llama": {"causal", "keys"}}  # of the texts below
every = pytest.mark.parametrize("kind", [pytest.param(m, id=m.__name__) for m in ALL])
each_model = pytest.mark.parametrize("name", NEEDS)


def swapped_model(name, kind):
    model = BY_NAME[name].build()
    hd.swap(model, {layer: kind(**SETTINGS.get(kind.__name__, {})) for layer in attention_modules(model)})
    return model


def texts(length=20):
    """Two texts, the second shorter."""
    torch.manual_seed(1)
    mask = torch.ones(2, length, dtype=torch.long)
    mask[1, -6:] = 0
    return {"input_ids": torch.randint(3, WORDS, (2, length)), "attention_mask": mask}


def output(model, given):
    found = model(**given)
    return found.logits if "logits" in found else found.last_hidden_state


def refused(name, kind):
    """Run where the mechanism cannot; the refusal."""
    with pytest.raises(hd.Unsupported) as refusal:
        output(swapped_model(name, kind), texts())
    return str(refusal.value)


@each_model
@every
def test_it_runs_and_learns_or_refuses_by_name(kind, name):
    if not NEEDS[name] <= kind.supports:
        said, layer = refused(name, kind), next(iter(attention_modules(BY_NAME[name].build())))
        assert layer in said
        assert kind.instead in said
        return
    model, given = swapped_model(name, kind), texts()
    out = output(model, given)
    assert torch.isfinite(out[given["attention_mask"].bool()]).all()
    loss = (out * given["attention_mask"][..., None]).square().mean()
    loss.backward()
    found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert found
    assert all(torch.isfinite(g).all() for g in found.values())
    assert any("v_proj" in n or "value" in n for n, g in found.items() if g.abs().max() > 0)


@each_model
@every
def test_what_the_refusal_names_does_run(kind, name):
    if NEEDS[name] <= kind.supports:
        return
    other, settings = re.findall(r"(\w+)\((.*?)\)", kind.instead)[0]
    instead = from_settings(other, {key: json.loads(value) for key, value in re.findall(r"(\w+)=([^,]+)", settings)})
    model = BY_NAME[name].build()
    hd.swap(model, dict.fromkeys(attention_modules(model), instead))
    assert torch.isfinite(output(model, texts())[0]).all()


@each_model
@every
def test_padding_leaves_the_shorter_text_alone(kind, name):
    if not NEEDS[name] <= kind.supports:
        return
    model, given = swapped_model(name, kind).eval(), texts()
    alone = {key: x[1:, :-6] for key, x in given.items()}
    with torch.no_grad():
        assert torch.allclose(output(model, given)[1, :-6], output(model, alone)[0], atol=1e-3)


@each_model
@every
def test_its_weights_travel_with_the_model(kind, name):
    if not NEEDS[name] <= kind.supports:
        return
    model, given = swapped_model(name, kind), texts()
    again = swapped_model(name, kind)
    with torch.no_grad():
        wanted = output(model, given)
        again.load_state_dict(model.state_dict())
        assert torch.equal(output(again, given), wanted)
    assert swapped(again).keys() == swapped(model).keys()
