"""Heads: each head is answered by its own mechanism, in calls, in training, in files and in decoding."""

import copy
import json
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import nn

from heedful.attention import Mask, Mechanism, State, Unsupported
from heedful.mechanisms import Hard, Heads, Performer, Softmax, Sparse, TopK, from_settings


def tensors(key_heads=6):
    return [torch.randn(2, heads, 20, 8) for heads in (6, key_heads, key_heads)]


def mixed():
    return Heads([((4, 1), TopK(3)), ((5,), Hard())], rest=Softmax(beta=2.0))


@pytest.mark.parametrize("key_heads", [1, 2, 3, 6])
@pytest.mark.parametrize("causal", [False, True])
def test_each_head_gets_what_its_mechanism_gives(key_heads, causal):
    q, k, v = tensors(key_heads)
    out, mask = mixed()(q, k, v, Mask(causal=causal)), Mask(causal=causal)
    for heads, mechanism in (((4, 1), TopK(3)), ((5,), Hard()), ((0, 2, 3), Softmax(beta=2.0))):
        alone = mechanism(q, k, v, mask)
        for head in heads:
            torch.testing.assert_close(out[:, head], alone[:, head])


def test_heads_that_share_whole_key_heads_keep_sharing_them():
    seen = []

    class Spy(Softmax):
        def attend(self, q, k, v, mask, scale, cap=None, null=None):
            seen.append((q.shape[1], k.shape[1]))
            return super().attend(q, k, v, mask, scale, cap, null)

    Heads([((2, 3, 0, 1), Spy())], rest=Spy())(*tensors(3))
    Heads([((0, 2), Spy())], rest=Spy())(*tensors(3))
    assert seen == [(4, 2), (2, 1), (2, 2), (4, 4)]


def test_biases_and_null_logits_go_to_their_own_heads():
    q, k, v = tensors()
    bias, null = torch.randn(1, 6, 20, 20), torch.randn(6)
    out, mask = mixed()(q, k, v, Mask(bias=bias), null=null), Mask(bias=bias)
    torch.testing.assert_close(out[:, [4, 1]], TopK(3)(q, k, v, mask, null=null)[:, [4, 1]])
    torch.testing.assert_close(out[:, [0, 2, 3]], Softmax(2.0)(q, k, v, mask, null=null)[:, [0, 2, 3]])


def test_it_supports_what_all_parts_support_and_a_refusal_names_the_part():
    some = Heads([((1, 2), Performer(8))], rest=Sparse())
    assert some.supports == {"causal", "keys", "cross", "shared"}
    with pytest.raises(Unsupported, match=r"Performer \(heads 1, 2\) cannot honour a sliding window; use Softmax\(\)"):
        some(*tensors(), Mask(window=3))
    with pytest.raises(Unsupported, match=r"Sparse \(all other heads\) cannot honour a sliding window"):
        Heads([((1, 2), Hard())], rest=Sparse())(*tensors(), Mask(window=3))


@pytest.mark.filterwarnings("ignore:Performer")
def test_settings_hold_mechanisms_within_mechanisms():
    nested = Heads([((0,), Heads([((0,), TopK(3))])), ((2, 3), Performer(8, seed=3))], rest=Sparse("fixed", 4))
    again = from_settings("Heads", json.loads(json.dumps(nested.settings)))
    assert repr(again) == repr(nested)
    assert again.settings == nested.settings
    q, k, v = tensors()
    assert torch.equal(again(q, k, v), nested(q, k, v))


@dataclass(eq=False)
class Weighted(Mechanism):
    """The running mean of v, times one learned weight a head."""

    supports: ClassVar[frozenset[str]] = frozenset({"causal", "state", "keys"})

    def __post_init__(self):
        self.register_parameter("weight", None)

    def prepare(self, heads, head_dim):
        if self.weight is None:
            self.weight = nn.Parameter(torch.arange(1.0, heads + 1))

    def attend(self, q, k, v, mask, scale):
        return v.cumsum(-2) * self.weight[:, None, None]

    def advance(self, q, k, v, state, keys, scale):
        before = torch.zeros_like(v[:, :, :1]) if state is None else state.sums
        sums = v.cumsum(-2) + before
        return sums * self.weight[:, None, None], Sums(sums[:, :, -1:])


@dataclass(frozen=True, eq=False)
class Sums(State):
    sums: torch.Tensor


def test_parts_train_move_copy_and_save_with_it():
    learned = Heads([((0, 2), Weighted())], rest=Weighted())
    learned.prepare(6, 8)
    assert {n: tuple(p.shape) for n, p in learned.named_parameters()} == {"rest.weight": (4,), "own.0.weight": (2,)}
    learned(*tensors()).sum().backward()
    assert all(p.grad.abs().sum() > 0 for p in learned.parameters())
    other = copy.deepcopy(learned).double()
    assert other.own[0].weight.dtype == other.parts[0][1].weight.dtype == torch.float64
    with torch.no_grad():
        other.own[0].weight.fill_(7)
    assert learned.own[0].weight[0] == 1
    again = copy.deepcopy(learned)
    again.load_state_dict({name: 2 * t for name, t in learned.state_dict().items()})
    q, k, v = tensors()
    torch.testing.assert_close(again(q, k, v), 2 * learned(q, k, v))


def test_it_decodes_where_all_parts_do():
    some, (q, k, v) = Heads([((0, 2), Weighted())], rest=Weighted()), tensors(3)
    whole, state, parts = some(q, k, v, Mask(causal=True)), None, []
    for start in (0, 7, 8):
        new = slice(start, {0: 7, 7: 8, 8: 20}[start])
        out, state = some.decode(q[:, :, new], k[:, :, new], v[:, :, new], state)
        parts.append(out)
    torch.testing.assert_close(torch.cat(parts, 2), whole)
    assert state.repeat(3).bytes == 3 * state.bytes == 3 * 2 * 6 * 8 * 4
    turned = state.select(torch.tensor([1, 0]))
    assert torch.equal(turned.states[1].sums, state.states[1].sums.flip(0))
    with pytest.raises(Unsupported, match=r"Softmax \(all other heads\) cannot honour decoding from a state"):
        Heads([((0, 2), Weighted())]).decode(q, k, v)


def test_parts_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match=r"heads \[1\] are in two parts"):
        Heads([((0, 1), Hard()), ((1,), TopK())])
    with pytest.raises(ValueError, match="head 9 but the layer has 6"):
        Heads([((9,), Hard())])(*tensors())
    for wrong in ((), (-1,), "01", 3):
        with pytest.raises(ValueError, match="name one or more by number"):
            Heads([(wrong, Hard())])
    with pytest.raises(TypeError, match="give a Mechanism"):
        Heads([((0,), "Hard")])
    one = Hard()
    with pytest.raises(ValueError, match="one mechanism stands in two parts"):
        Heads([((0,), one)], rest=one)
