"""Jacobians in closed form equal those of autograd, and their products are what they multiply to."""

import layers
import pytest
import torch

from heedful.exact import Derivative, Layer, attention_jacobian, attention_jvp, attention_vjp, context_jacobian, jacobian

every = pytest.mark.parametrize("name", list(layers.CASES))
short = pytest.mark.parametrize("name", [name for name in layers.CASES if name != "long"])


def same(found, wanted, digits=1e-13):
    assert found.shape == wanted.shape
    assert float((found - wanted).abs().max()) <= digits * max(1.0, float(wanted.abs().max()))


@short
def test_every_block_is_autograds(name):
    x, layer = layers.CASES[name]()
    same(attention_jacobian(x, layer), torch.func.jacrev(lambda x: layers.dense(layer, x))(x))


@short
def test_the_context_has_its_own(name):
    x, layer = layers.CASES[name]()
    source = x if layer.context is None else layer.context
    wanted = torch.func.jacrev(lambda source: layers.dense(layer, x, source))(source)
    same(context_jacobian(x, layer), wanted)


@every
def test_products_need_no_jacobian(name):
    x, layer = layers.CASES[name]()
    dx, grad = layers.drawn(30, *x.shape), layers.drawn(31, len(x), layers.OUTPUTS)
    attend = lambda x: layers.dense(layer, x)  # noqa: E731
    same(attention_jvp(x, dx, layer), torch.func.jvp(attend, (x,), (dx,))[1])
    same(attention_vjp(x, grad, layer), torch.func.vjp(attend, x)[1](grad)[0])


@every
def test_products_with_the_contexts_jacobian(name):
    x, layer = layers.CASES[name]()
    near, source = Derivative(x, layer), x if layer.context is None else layer.context
    grad = layers.drawn(31, len(x), layers.OUTPUTS)
    _, pull = torch.func.vjp(lambda x, source: layers.dense(layer, x, source), x, source)
    same(near.pull_context(grad), pull(grad)[1])
    if layer.context is not None:
        dx, dy = layers.drawn(30, *x.shape), layers.drawn(32, *source.shape)
        moved = torch.func.jvp(lambda x, source: layers.dense(layer, x, source), (x, source), (dx, dy))[1]
        same(near.push(dx, dy), moved)
        same(near.push(d_context=dy) + near.push(dx), moved)


@every
def test_the_layer_itself_is_the_dense_formula(name):
    x, layer = layers.CASES[name]()
    same(layer(x), layers.dense(layer, x))


def test_chunks_add_up(monkeypatch):
    x, layer = layers.CASES["causal"]()
    whole = attention_jacobian(x, layer)
    monkeypatch.setattr(jacobian, "CHUNK", 1)
    same(attention_jacobian(x, layer), whole, 1e-15)


@every
def test_probabilities_that_are_not_kept_are_had_again(name, monkeypatch):
    from heedful.exact import call_derivative

    x, layer = layers.CASES[name]()
    dx, grad = layers.drawn(30, *x.shape), layers.drawn(31, len(x), layers.OUTPUTS)
    near = Derivative(x, layer)
    kept = near.push(dx), near.pull(grad)
    monkeypatch.setattr(call_derivative, "KEPT", 0)
    near = Derivative(x, layer)
    for _ in range(3):  # the first time from the call, then from lse
        same(near.push(dx), kept[0])
        same(near.pull(grad), kept[1])
    assert near.call.kept is None
    assert near.call.seen


def test_the_issues_own_spelling_takes_plain_tensors():
    x, w = layers.drawn(0, 4, 6), layers.drawn(1, 4, 6, 6)
    layer = Layer(*w, heads=3, scale=0.3, mask=torch.ones(4, 4).tril().bool())
    found = attention_jacobian(x, w[0], w[1], w[2], w[3], heads=3, scale=0.3, mask=torch.ones(4, 4).tril().bool())
    assert torch.equal(found, attention_jacobian(x, layer))
    same(found, torch.func.jacrev(lambda x: layers.dense(layer, x))(x))


def test_single_precision_stays_near():
    x, layer = layers.CASES["plain"]()
    truth = attention_jacobian(x, layer)
    single = Layer(*(getattr(layer, name).float() for name in ("w_q", "w_k", "w_v", "w_o")), heads=2)
    found = attention_jacobian(x.float(), single)
    assert found.dtype == torch.float32
    assert (found - truth).norm() < 1e-6 * truth.norm()


def test_a_jacobian_that_does_not_fit_is_refused_with_its_size():
    x = torch.zeros(1, 1).expand(300_000, 64)
    w = torch.zeros(4, 64, 64)
    with pytest.raises(ValueError, match=r"would take 1.47e\+06 GB, and .* GB are free; attention_jvp"):
        attention_jacobian(x, *w)


BAD = {
    "x is .* but w_q reads 5": lambda x, layer: attention_jacobian(x[:, :4], layer),
    r"x holds nan at \[2, 1\]": lambda x, layer: attention_jacobian(
        x.index_put((torch.tensor(2), torch.tensor(1)), torch.tensor(torch.nan).double()), layer
    ),
    "x holds -inf": lambda x, layer: attention_vjp(x / 0, layers.drawn(0, 6, 7), layer),
    "w_v holds nan": lambda x, layer: Layer(layer.w_q, layer.w_k, layer.w_v * torch.nan, layer.w_o, 2),
    "dx is .* but must be": lambda x, layer: attention_jvp(x, x[:3], layer),
    "dx holds nan": lambda x, layer: attention_jvp(x, x * torch.nan, layer),
    "grad is .* but must be": lambda x, layer: attention_vjp(x, x, layer),
    "the layer has no context": lambda x, layer: Derivative(x, layer).push(x, x),
    "4 heads do not divide": lambda x, layer: Layer(layer.w_q, layer.w_k, layer.w_v, layer.w_o, 4),
    "0 heads do not divide": lambda x, layer: Layer(layer.w_q, layer.w_k, layer.w_v, layer.w_o, 0),
    "keys must be as wide as queries": lambda x, layer: Layer(layer.w_q, layer.w_k[:, :4], layer.w_v, layer.w_o, 2),
    "matrices; got w_q": lambda x, layer: Layer(layer.w_q[0], layer.w_k, layer.w_v, layer.w_o, 2),
    "made of the same tokens": lambda x, layer: Layer(layer.w_q, layer.w_k, layer.w_v[:4], layer.w_o, 2),
    "without a context": lambda x, layer: Layer(layer.w_q, layer.w_k[:4], layer.w_v[:4], layer.w_o, 2),
    "the context is": lambda x, layer: layers.layer(context=layers.drawn(0, 3, 9)),
    "3 biases were given": lambda x, layer: Layer(layer.w_q, layer.w_k, layer.w_v, layer.w_o, 2, biases=[None] * 3),
    "the bias of w_k is": lambda x, layer: Layer(layer.w_q, layer.w_k, layer.w_v, layer.w_o, 2, biases=[None, x[0], None, None]),
    "a mask of shape": lambda x, layer: layers.layer(mask=torch.ones(3, 3).bool()).call(x),
    "the mask holds nan": lambda x, layer: layers.layer(mask=torch.full((6, 6), torch.nan)).call(x),
    "has its scale already": lambda x, layer: attention_jacobian(x, layer, scale=2.0),
}


@pytest.mark.parametrize("message", list(BAD))
def test_bad_input_is_named(message):
    x, layer = layers.CASES["biases"]()
    with pytest.raises((ValueError, TypeError), match=message):
        BAD[message](x, layer)
