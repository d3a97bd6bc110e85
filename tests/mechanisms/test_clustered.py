"""Clustered: every key counts once, by itself or in its cluster's mean; the more it reads the closer it comes."""

import copy

import pytest
import torch
from torch.nn import functional as F

from heedful.attention import Mask
from heedful.mechanisms import Clustered
from heedful.ops.clustered import choose_clusters
from heedful.ops.clustered_causal import Reach, choose_past, means_of, remember
from heedful.ops.clusters import cluster_means, means_in_order, nearest_means, spend

CAUSAL = Mask(causal=True)
SMALL = {"clusters": 8, "exact": 24, "window": 8, "sinks": 2, "group": 4}
both = pytest.mark.parametrize("mask", [Mask(), CAUSAL], ids=["bidirectional", "causal"])


def softmax(q, k, v, mask):
    return F.scaled_dot_product_attention(q, k, v, is_causal=mask.causal)


def off(found, wanted):
    return float(((found - wanted).norm() / wanted.norm()).detach())


def near_each_other(tokens=300, dim=16, centres=12):
    """Keys in tight clusters far apart."""
    centre = torch.randn(1, 2, centres, dim) * 2
    k = centre[:, :, torch.randint(centres, (tokens,))] + 0.05 * torch.randn(1, 2, tokens, dim)
    return torch.randn(1, 2, tokens, dim), k, torch.randn(1, 2, tokens, dim)


@both
def test_keys_in_tight_clusters_need_little_work(mask):
    q, k, v = near_each_other()
    v = k + 0.05 * v
    found = Clustered(clusters=64, exact=32, window=16, group=8)(q, k, v, mask)
    assert off(found, softmax(q, k, v, mask)) < 0.1


@both
def test_more_exact_keys_come_closer(mask):
    q, k, v = torch.randn(3, 1, 2, 300, 16)
    errors = [off(Clustered(32, exact, 32, 4, 8)(q, k, v, mask), softmax(q, k, v, mask)) for exact in (16, 64, 160, 400)]
    assert errors[0] > errors[1] > errors[2] > errors[3]
    assert errors[3] < 1e-5  # all keys fit


@both
def test_what_is_short_is_exact(mask):
    q, k, v = torch.randn(3, 2, 3, 60, 8)
    assert off(Clustered()(q, k, v, mask), softmax(q, k, v, mask)) < 1e-5


def test_every_token_is_in_one_cluster_and_padding_in_none():
    x, counts = torch.randn(3, 50, 4), torch.tensor([50, 31, 2])
    label, sizes = nearest_means(x, 6, 2, counts)
    assert sizes.sum(1).tolist() == counts.tolist()
    for row, count in enumerate(counts.tolist()):
        assert (label[row, :count] < 6).all()
        assert (label[row, count:] == 6).all()
    means = cluster_means(x, label, sizes)
    member = x[1, :31][label[1, :31] == label[1, 0]]
    assert torch.allclose(means[1, label[1, 0]], member.mean(0), atol=1e-6)


def test_the_budget_goes_to_the_best_clusters_and_is_never_exceeded():
    scores, sizes = torch.tensor([[0.1, 0.9, 0.5, 0.7]]), torch.tensor([[3, 2, 4, 0]])
    chosen, which, offset, used = spend(scores, sizes, budget=7)
    assert chosen.tolist() == [[False, True, True, True]]
    assert which[used].tolist() == [1, 1, 2, 2, 2, 2]
    assert offset[used].tolist() == [0, 1, 0, 1, 2, 3]
    assert used.sum() == 6


def test_a_cluster_larger_than_the_budget_stands_in_no_other_one_s_way():
    chosen, _, _, used = spend(torch.tensor([[2.0, 1.0]]), torch.tensor([[9, 3]]), budget=4)
    assert chosen.tolist() == [[False, True]]
    assert used.sum() == 3


def test_picked_keys_are_those_of_the_chosen_clusters():
    label, sizes = nearest_means(torch.randn(3, 80, 6), 8, 1)
    choice = choose_clusters(torch.randn(3, 5, 8), label.argsort(dim=-1, stable=True), sizes, 40)
    for row in range(3):
        for group in range(5):
            picked = choice.picked[row, group][choice.real[row, group]]
            wanted = choice.chosen[row, group][label[row]].nonzero()[:, 0]
            assert sorted(picked.tolist()) == wanted.tolist()
            assert len(picked) > 0


def test_clusters_are_made_for_the_queries_that_look():
    """Keys that differ only where no query looks belong together."""
    k = torch.randn(1, 200, 2) * torch.tensor([1.0, 50.0])
    metric = torch.tensor([[[1.0, 0.0], [0.0, 1e-6]]])
    seen, plain = (nearest_means(k, 8, 3, metric=m) for m in (metric, None))

    def spread(label, sizes):
        return float((k - cluster_means(k, label, sizes)[0, label[0]])[..., 0].square().mean())

    assert spread(*seen) < 0.1 * spread(*plain)


@pytest.mark.parametrize("in_order", [False, True])
def test_means_are_those_of_the_members_and_0_of_none(in_order):
    x, counts = torch.randn(3, 50, 4), torch.tensor([50, 31, 2])
    label, sizes = nearest_means(x, 6, 1, counts)
    order = label.argsort(dim=-1, stable=True)
    found = means_in_order(x, order, sizes) if in_order else cluster_means(x, label, sizes)
    for row in range(3):
        for cluster in range(6):
            member = x[row][label[row] == cluster]
            wanted = member.mean(0) if len(member) else torch.zeros(4)
            assert torch.allclose(found[row, cluster], wanted, atol=1e-6)


@pytest.mark.parametrize("windows", [2, 3, 4, 7, 8, 13])
def test_each_window_sees_every_past_key_once(windows):
    reach = Reach(window=8, sinks=0, clusters=6, exact=16, rounds=1, group=4)
    q, k = torch.randn(2, 2, 8 * windows, 4)
    table = remember(q, k, reach, 0)
    for row in range(2):
        for window in range(windows):
            seen = table.seen[window][table.there[window]]
            spans = [(int(table.start[row, c]), int(table.sizes[row, c])) for c in seen]
            tokens = [int(table.order[row, place]) for start, size in spans for place in range(start, start + size)]
            assert sorted(tokens) == list(range(8 * window))


def test_the_means_of_the_past_are_those_of_its_tokens():
    reach = Reach(window=8, sinks=0, clusters=4, exact=8, rounds=1, group=4)
    k = torch.randn(1, 40, 4)
    table = remember(k, k, reach, 0)
    means = means_of(k, table)[0]
    for cluster in range(len(means)):
        start, size = int(table.start[0, cluster]), int(table.sizes[0, cluster])
        if size:
            assert torch.allclose(means[cluster], k[0, table.order[0, start : start + size]].mean(0), atol=1e-6)


def test_no_choice_is_made_from_later_tokens():
    """Not even which past keys are read: the plans of all windows before a change are the same."""
    reach = Reach(window=8, sinks=0, clusters=4, exact=8, rounds=1, group=4)
    q, k = torch.randn(2, 1, 80, 4)

    def picked(q, k):
        table = remember(q, k, reach, 0)
        return choose_past(q.view(10, 2, 4, 4)[:, :, 0], means_of(k, table), table, reach, 0.5)[1]

    before = picked(q, k)
    q, k = q.clone(), k.clone()
    q[:, 41:], k[:, 41:] = 9, -9
    assert torch.equal(picked(q, k)[:, :11], before[:, :11])


def test_the_past_met_grows_with_the_logarithm_of_the_length():
    reach = Reach(window=64, sinks=4, clusters=32, exact=64, rounds=0, group=32)
    visible = [remember(*torch.randn(2, 1, 64 * w, 4), reach, 0).seen.shape[1] for w in (16, 32, 64, 128)]
    assert visible == [60, 92, 124, 156]


@both
def test_gradients_pass_gradcheck(mask):
    q, k, v = (torch.randn(1, heads, 30, 3, dtype=torch.float64, requires_grad=True) for heads in (2, 1, 1))
    mechanism = Clustered(4, 8, 4, 1, 2)
    assert torch.autograd.gradcheck(lambda q, k, v: mechanism(q, k, v, mask), (q, k, v), eps=1e-7, atol=1e-5)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("garbage", [torch.inf, torch.nan])
def test_not_even_a_nan_gets_out_of_the_padding(garbage, causal):
    q, k, v = torch.randn(3, 1, 2, 60, 8)
    keys = (torch.arange(60) < 45)[None]
    mask, mechanism = Mask(causal=causal, keys=keys), Clustered(**SMALL)
    wanted = mechanism(q, k, v, mask)[:, :, :45]
    q[:, :, 45:], k[:, :, 45:], v[:, :, 45:] = garbage, garbage, garbage
    assert torch.equal(mechanism(q, k, v, mask)[:, :, :45], wanted)


@pytest.mark.parametrize("causal", [False, True])
def test_padding_may_lie_anywhere(causal):
    q, k, v = torch.randn(3, 1, 2, 60, 8)
    keys = torch.rand(1, 60) > 0.3
    alone = Clustered(**SMALL)(*(t[:, :, keys[0]] for t in (q, k, v)), Mask(causal=causal))
    found = Clustered(**SMALL)(q, k, v, Mask(causal=causal, keys=keys))
    assert off(found[:, :, keys[0]], alone) < 1e-5
    assert (found[:, :, ~keys[0]] == 0).all()


def test_memory_is_linear_in_the_tokens():
    """Every tensor kept for the backward pass together: twice the tokens, little more than twice the numbers."""

    def kept(tokens, mask):
        q, k, v = (torch.randn(1, 1, tokens, 8, requires_grad=True) for _ in range(3))
        held = {}
        with torch.autograd.graph.saved_tensors_hooks(lambda t: held.setdefault(t.data_ptr(), t), lambda t: t):
            Clustered(**SMALL)(q, k, v, mask)
        return sum(t.numel() for t in held.values())

    assert kept(2048, Mask()) < 2.3 * kept(1024, Mask())
    assert kept(2048, CAUSAL) < 2.5 * kept(1024, CAUSAL)


@pytest.mark.parametrize(
    "settings, needed",
    [
        ({"clusters": 1}, "clusters is 1; it must be a whole number of at least 2"),
        ({"exact": 0}, "exact is 0; it must be a whole number of at least 1"),
        ({"rounds": 0.5}, r"rounds is 0\.5; it must be a whole number"),
        ({"window": 48}, "a window of 48 is not a multiple of 4 and of the group, 32"),
    ],
    ids=str,
)
def test_bad_settings_are_refused_at_once(settings, needed):
    with pytest.raises(ValueError, match=needed):
        Clustered(**settings)


def test_it_can_be_copied():
    q, k, v = torch.randn(3, 1, 2, 60, 8)
    mechanism = Clustered(**SMALL)
    assert torch.equal(copy.deepcopy(mechanism)(q, k, v), mechanism(q, k, v))


@both
def test_torch_func_transforms_pass_through(mask):
    q, k, v = torch.randn(3, 1, 2, 60, 8)
    mechanism = Clustered(**SMALL)
    found = torch.func.grad(lambda q: mechanism(q, k, v, mask).sum())(q)
    inputs = q.clone().requires_grad_()
    wanted = torch.autograd.grad(mechanism(inputs, k, v, mask).sum(), inputs)[0]
    assert torch.allclose(found, wanted, atol=1e-5)
