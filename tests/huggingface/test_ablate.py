"""Ablation: what is left is the formula without the part, for every family that is a transformer; the model is as it was."""

import copy

import pytest
import torch

from heedful.huggingface import attention_modules, watching
from heedful.huggingface.ablate import ABLATIONS, Ablation, Unablatable, ablated
from heedful.huggingface.stacks import stacks

from .zoo import BY_NAME, FAMILIES


def drawn(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def bert(block, x, a):
    y = block.attention.output.dense(block.attention.self(x)[0])
    y = y + x if a.skip else y
    y = block.attention.output.LayerNorm(y) if a.norms else y
    if a.mlp:
        y = y + block.output.dense(block.intermediate(y))
        y = block.output.LayerNorm(y) if a.norms else y
    return y


def before(attend, mlp, norms):
    """A block whose norms come first."""

    def forward(block, x, a):
        first, second = (norm(block) if a.norms else torch.nn.Identity() for norm in norms)
        y = attend(block, first(x))
        y = y + x if a.skip else y
        return y + mlp(block)(second(y)) if a.mlp else y

    return forward


FORMULAS = {
    "bert": bert,
    "gpt2": before(lambda b, x: b.attn(x)[0], lambda b: b.mlp, (lambda b: b.ln_1, lambda b: b.ln_2)),
    "llama": before(
        lambda b, x: b.self_attn(x, position_embeddings=still(b, x), attention_mask=None)[0],
        lambda b: b.mlp,
        (lambda b: b.input_layernorm, lambda b: b.post_attention_layernorm),
    ),
    "vit": before(lambda b, x: b.attention(x)[0], lambda b: b.mlp, (lambda b: b.layernorm_before, lambda b: b.layernorm_after)),
}
EVERY = [Ablation(skip, mlp, norms) for skip in (True, False) for mlp in (True, False) for norms in (True, False)]


def still(block, x):
    """The rotary embedding that turns nothing."""
    return torch.ones(1, x.shape[1], block.self_attn.head_dim), torch.zeros(1, x.shape[1], block.self_attn.head_dim)


def blocks_of(model):
    """The list of blocks of a tiny model, and what one is called with beside its states."""
    for path in ("encoder.layer", "transformer.h", "h", "model.layers", "layers"):
        try:
            return model.get_submodule(path)
        except AttributeError:
            continue
    raise AssertionError(type(model))


@pytest.mark.parametrize("ablation", EVERY, ids=str)
@pytest.mark.parametrize("name", FORMULAS)
def test_a_block_without_a_part_is_its_formula_without_it(name, ablation):
    model = BY_NAME[name].build()
    block, x = blocks_of(model)[1], drawn(2, 5, 32)
    more = {"position_embeddings": still(block, x), "attention_mask": None} if name == "llama" else {}
    with torch.no_grad():
        wanted = FORMULAS[name](block, x, ablation)
        with ablated(model, ablation):
            found = block(x, **more)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6 * float(wanted.abs().amax()))


REFUSED = {  # and why
    "albert": "may lie within that module",
    "whisper": "attends more than once",
    "bart": "attends more than once",
    "mbart": "attends more than once",
    "pegasus": "attends more than once",
    "marian": "attends more than once",
    "t5": "attends more than once",
}
SIDE_BY_SIDE = {"gpt_neox", "cohere"}


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_every_family_is_ablated_or_refused_by_name_and_left_as_it_was(family):
    model = family.build()
    _, given, _ = next(iter(family.inputs()))
    weights = copy.deepcopy(model.state_dict())
    with torch.no_grad():
        first = states(model, given)
        changed = set()
        for name in ABLATIONS:
            refused = REFUSED.get(family.name) if name != "full" else None
            if family.name in SIDE_BY_SIDE and name == "no attention skip":
                refused = "share one skip"
            if refused:
                with (
                    pytest.raises(Unablatable, match=rf"{type(model).__name__} cannot be ablated: in \S+ .*{refused}"),
                    ablated(model, name),
                ):
                    states(model, given)
                continue
            with ablated(model, name):
                found = states(model, given)
            assert torch.equal(found, first) is (name == "full")
            changed.add(round(float(found.double().norm()), 9))
        assert refused or len(changed) >= 4  # no two ablations are the same
        assert torch.equal(states(model, given), first)
    assert all(torch.equal(weights[key], value) for key, value in model.state_dict().items())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def states(model, given):
    """What the model's last block gives."""
    found = []
    last = [block for stack in stacks(attention_modules(model)).values() for block in stack][-1]
    handle = model.get_submodule(last).register_forward_hook(
        lambda module, args, out: found.append(out[0] if isinstance(out, tuple) else out)
    )
    try:
        model(**given)
    finally:
        handle.remove()
    return found[-1]


def test_hooks_go_when_the_forward_pass_fails():
    model = BY_NAME["bert"].build()
    with pytest.raises(IndexError), ablated(model, "pure SAN"):
        model(torch.tensor([[10**6]]))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    ids = torch.arange(5)[None]
    whole = model(ids).last_hidden_state
    with ablated(model, "pure SAN"):
        with pytest.raises(RuntimeError):
            model.encoder.layer[0](drawn(1, 3, 31))  # fails within a block
        alone = model(ids).last_hidden_state
    assert not torch.equal(alone, whole)
    assert torch.equal(model(ids).last_hidden_state, whole)


def test_pure_attention_is_what_the_seam_sees_go_in():
    """Layer by layer: with everything gone a layer reads what the one before projected."""
    model = BY_NAME["gpt2"].build()
    seen, given = [], torch.arange(3, 9)[None]
    with torch.no_grad(), watching(model, seen.append), ablated(model, "pure SAN"):
        model(given)
    attention = blocks_of(model)[0].attn
    out = attention.c_proj(seen[0].out.transpose(1, 2).flatten(2))
    q = blocks_of(model)[1].attn.c_attn(out).chunk(3, -1)[0].unflatten(-1, (4, 8)).transpose(1, 2)
    torch.testing.assert_close(seen[1].q, q)


def test_gradients_flow_through_what_is_left():
    model = BY_NAME["vit"].build()
    with ablated(model, "SAN + LN"):
        model(pixel_values=drawn(1, 3, 16, 16)).last_hidden_state.square().sum().backward()
    block = blocks_of(model)[0]
    assert all(p.grad is not None for p in block.attention.parameters())
    assert all(p.grad is None or not p.grad.any() for p in block.mlp.parameters())


def test_what_cannot_be_named_or_has_no_blocks_is_refused():
    with (
        pytest.raises(ValueError, match="no ablation 'no heads'; give one of 'full', 'no MLP'"),
        ablated(BY_NAME["bert"].build(), "no heads"),
    ):
        pass
    with pytest.raises(Unablatable, match="Linear has no numbered blocks"), ablated(torch.nn.Linear(2, 2), "no MLP"):
        pass
