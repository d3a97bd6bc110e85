"""In double: a model keeps the digits that its own code would drop."""

import pytest
import torch

from heedful.huggingface.double import in_double

from .zoo import BY_NAME


@pytest.mark.parametrize("name", ["bert", "llama", "gemma", "qwen3", "gpt2", "vit"])
def test_a_copy_computes_in_float64_and_the_model_stays(name):
    model = BY_NAME[name].build()
    _, given, _ = next(iter(BY_NAME[name].inputs()))
    seen = set()
    handles = []
    with torch.no_grad(), in_double(model) as exact:
        handles += [
            m.register_forward_hook(lambda m, args, out: seen.add(out.dtype) if isinstance(out, torch.Tensor) else None)
            for m in exact.modules()
        ]
        doubled = {k: v.double() if v.is_floating_point() else v for k, v in given.items()}
        found = exact(**doubled)[0]
        plain = model(**given)[0]
    assert seen <= {torch.float64, torch.int64, torch.bool}
    assert plain.dtype == torch.float32
    torch.testing.assert_close(found.float(), plain, atol=1e-3, rtol=1e-3)
    with torch.no_grad():
        assert torch.equal(model(**given)[0], plain)


def test_outside_the_block_casts_are_casts_again():
    with in_double(torch.nn.Linear(2, 2)):
        assert torch.ones(2).double().float().dtype == torch.float64
    assert torch.ones(2).double().float().dtype == torch.float32
    assert torch.ones(2).double().to(torch.float32).dtype == torch.float32


def test_experts_are_had_in_double_too():
    model = BY_NAME["mixtral"].build("eager")
    before = model.config._experts_implementation
    with in_double(model) as exact, torch.no_grad():
        assert exact(torch.tensor([[3, 4, 5]])).logits.dtype == torch.float64
    assert model.config._experts_implementation == before
