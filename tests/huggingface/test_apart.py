"""Models taken apart: the pieces compute what the model computes; what they cannot explain is refused by name."""

import pytest
import torch
from torch import nn

from heedful.huggingface import swap, unswap
from heedful.huggingface.apart import take_apart
from heedful.huggingface.blocks import Undecomposable, blocks
from heedful.huggingface.families import FAMILIES
from heedful.mechanisms import Local

from .zoo import BY_NAME


def inputs_of(family, dtype=torch.float64):
    for shown, given, real in family.inputs():
        yield shown, {name: x.to(dtype) if torch.is_tensor(x) and x.is_floating_point() else x for name, x in given.items()}, real


@pytest.mark.parametrize("name", FAMILIES)
def test_the_pieces_compute_what_the_model_computes(name):
    model = BY_NAME[name].build("sdpa").double()
    for shown, given, real in inputs_of(BY_NAME[name]):
        apart = take_apart(model, lambda given=given: model(**given))
        with torch.no_grad():
            exact = model.base_model(**given).last_hidden_state
        off = (apart.output - exact)[... if real is None else real].norm() / exact.norm()
        assert off <= (2e-7 if apart.blocks[0].rotary else 1e-13), f"{name}, {shown}: {off:.1e}"  # its norms round to float32


def test_a_block_computes_what_its_module_computes_from_its_input():
    model = BY_NAME["llama"].build()
    block, layer = blocks(model)[1], model.model.layers[1]
    x = torch.randn(1, 5, 32)
    torch.testing.assert_close(block.attended(x), layer.input_layernorm(x))
    torch.testing.assert_close(block.mlp(x), layer.mlp(x))
    v = layer.self_attn.v_proj(x).view(1, 5, 2, 8).transpose(1, 2)
    torch.testing.assert_close(block.heads.project(x)[2], v.repeat_interleave(2, 1), msg="shared heads are repeated")


def read(model):
    ids = torch.arange(3, 12)[None]
    return take_apart(model, lambda: model(input_ids=ids))


@pytest.mark.parametrize("name", ["t5", "granite", "distilbert"])
def test_other_families_are_refused_by_name(name):
    model = BY_NAME[name].build()
    with pytest.raises(Undecomposable, match=f"{type(model).__name__}.*'{name}'.*use one of bert"):
        blocks(model)


def test_a_swapped_mechanism_is_refused_until_it_is_taken_out():
    model = BY_NAME["bert"].build()
    swap(model, {"encoder.layer.1.attention.self": Local(window=3)})
    with pytest.raises(Undecomposable, match=r"encoder.layer.1.attention.self.*Local.*unswap"):
        read(model)
    unswap(model)
    assert len(read(model).blocks) == 2


class Scaled(nn.Linear):
    def forward(self, x):
        return 1.1 * super().forward(x)


def test_a_block_that_computes_something_else_is_refused_with_what_differs():
    model = BY_NAME["bert"].build()
    model.encoder.layer[1].attention.self.value.__class__ = Scaled
    with pytest.raises(Undecomposable, match=r"encoder.layer.1.attention.self of BertModel has another v"):
        read(model)
    model = BY_NAME["gpt2"].build()
    model.transformer.h[0].mlp.register_forward_hook(lambda module, args, output: 2 * output)
    with pytest.raises(Undecomposable, match=r"transformer.h.0 of GPT2LMHeadModel has another output"):
        read(model)


def test_another_activation_or_module_is_refused():
    with pytest.raises(Undecomposable, match=r"layers.0 has the activation 'tanh'"):
        blocks(BY_NAME["llama"].build(hidden_act="tanh"))
    model = BY_NAME["bert"].build()
    model.encoder.layer[0].output.dense = nn.Identity()
    with pytest.raises(Undecomposable, match=r"encoder.layer.0.output.dense is a Identity"):
        blocks(model)
    del model.encoder.layer[0].output
    with pytest.raises(Undecomposable, match=r"encoder.layer.0 has no module output.dense"):
        blocks(model)


def test_bad_numbers_and_training_are_refused():
    model = BY_NAME["bert"].build()
    with pytest.raises(ValueError, match="training mode"):
        read(model.train())
    model.eval().encoder.layer[0].output.dense.bias.data[3] = torch.nan
    with pytest.raises(ValueError, match=r"encoder.layer.0 of BertModel gives NaN"):
        read(model)


def test_a_run_reads_one_batch():
    model = BY_NAME["bert"].build()
    ids = torch.arange(3, 12)[None]
    with pytest.raises(Undecomposable, match="ran 2 times"):
        take_apart(model, lambda: (model(ids), model(ids)))


def test_afterwards_the_model_is_as_it_was():
    model = BY_NAME["llama"].build("sdpa").double()
    ids = torch.arange(3, 12)[None]
    with torch.no_grad():
        before = model(ids).logits
        read(model)
        assert torch.equal(model(ids).logits, before)
