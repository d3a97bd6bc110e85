"""On models as they run: captured calls are edited, and a layer's own weights give its calls and its stretch."""

import models
import pytest
import torch

import heedful as hd
from heedful.exact import Layer, Removal, attention_jvp, delete_token, key_sensitivity, local_lipschitz
from heedful.exact.edits import answer


@pytest.mark.parametrize("made", [models.bert, models.llama], ids=["bert", "llama"])
def test_tokens_of_a_models_texts_are_ranked(made):
    calls = hd.capture(made(), [models.words(12), models.words(7)], batch=2)
    for call, *_ in calls.values():
        removal = Removal.of(call)
        for key in (0, 3):
            gap = delete_token(call, key) - answer(call)[0]
            gap = gap if call.real is None else gap * call.real[:, None, :, None]
            torch.testing.assert_close(removal.norms[..., key], gap.norm(dim=(2, 3)), rtol=1e-3, atol=1e-5)
        lengths = call.sources.tolist()
        assert all(set(order[:n]) == set(range(n)) for order, n in zip(removal.ranked(), lengths, strict=True))  # padding is last
        assert key_sensitivity(call).shape == removal.norms.shape


@pytest.mark.parametrize("number", [0, 1])
def test_a_models_own_weights_give_its_own_calls(number):
    checkpoint = models.bert()
    part = checkpoint.model.encoder.layer[number].attention
    maps = [part.self.query, part.self.key, part.self.value, part.output.dense]
    layer = Layer(*(m.weight.mT for m in maps), heads=4, biases=[m.bias for m in maps])
    with torch.no_grad():
        x = checkpoint.model(torch.arange(9)[None], output_hidden_states=True).hidden_states[number][0]
        call = layer.call(x)
        run = list(hd.capture(checkpoint, [{"input_ids": torch.arange(9)[None]}]).values())[number][0]
    torch.testing.assert_close(call.q, run.q, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(answer(call)[0], run.out, rtol=1e-4, atol=1e-5)
    found = local_lipschitz(x, layer)
    dx = torch.randn(x.shape)
    assert attention_jvp(x, dx, layer).norm() <= found.value * 1.001 * dx.norm()


def test_products_over_long_texts_hold_no_matrix_of_all_pairs(monkeypatch):
    from heedful.exact import call_derivative
    from heedful.measuring import peak_memory

    monkeypatch.setattr(call_derivative, "KEPT", 0)
    layer, x = Layer(*torch.randn(4, 8, 8), heads=2), torch.randn(4096, 8)
    attention_jvp(x[:256], x[:256], layer)
    taken = peak_memory(lambda: attention_jvp(x, x, layer), torch.device("cpu"))
    assert taken is None or taken < 2 * 4096**2 * 4 / 4  # bytes of a quarter of P
