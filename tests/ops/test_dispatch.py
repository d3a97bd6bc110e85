"""One choice of what runs an op, and both answers alike."""

import threading

import dense
import pytest
import torch

from heedful.ops import hop, plain
from heedful.ops.dispatch import fusable, is_plain


def test_plain_holds_inside_its_block_only_and_nests():
    assert not is_plain()
    with plain():
        with plain():
            assert is_plain()
        assert is_plain()
    assert not is_plain()


def test_plain_ends_even_when_the_block_fails():
    with pytest.raises(RuntimeError), plain():
        raise RuntimeError
    assert not is_plain()


def test_plain_is_a_matter_of_one_thread():
    seen = []
    with plain():
        thread = threading.Thread(target=lambda: seen.append(is_plain()))
        thread.start()
        thread.join()
    assert seen == [False]


def test_what_no_kernel_takes_is_left_to_the_formula():
    q, k, v = dense.tensors(5, 5)
    assert fusable(q, k, v)
    with plain():
        assert not fusable(q, k, v)
    assert not fusable(*(t.double() for t in (q, k, v)))
    assert not fusable(q.half(), k, v)
    assert not fusable(q[:0], k[:0], v[:0])
    assert not fusable(*(t.to("meta") for t in (q, k, v)))


def test_vmap_and_functional_gradients_pass_through_the_hop():
    q, k, v = dense.tensors(5, 6)
    found = torch.vmap(lambda q, k, v: hop(q[None], k[None], v[None])[0][0])(q, k, v)
    torch.testing.assert_close(found, hop(q, k, v)[0], rtol=1e-5, atol=1e-6)
    gradient = torch.func.grad(lambda q: hop(q, k, v)[1].sum())(q)
    leaf = q.clone().requires_grad_()
    hop(leaf, k, v)[1].sum().backward()
    torch.testing.assert_close(gradient, leaf.grad, rtol=1e-4, atol=1e-5)
