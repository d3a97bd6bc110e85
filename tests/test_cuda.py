"""On a GPU everything gives what it gives on the CPU."""

import dense as truth
import pytest
import torch
from contracts.test_mechanisms import EXTRAS, MASKS, build, gradients, named, off, tensors
from models import bert, llama, words

from heedful import Checkpoint, exact, scan
from heedful.attention import Mask
from heedful.mechanisms import ALL
from heedful.ops import hop, plain

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here"),
    pytest.mark.filterwarnings("ignore:Performer"),
]
NEAR = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def placed(mask):
    """On the GPU; a rule moves by itself."""
    return mask.to("cuda")


@pytest.mark.parametrize("dtype", NEAR, ids=str)
@pytest.mark.parametrize("name", [*truth.MASKS, *truth.SQUARE])
def test_a_hop_equals_its_plain_formula_in_float64(name, dtype):
    mask = (truth.MASKS | truth.SQUARE)[name](65, 65)
    q, k, v, bias = torch.randn(2, 4, 65, 24), torch.randn(2, 2, 65, 24), torch.randn(2, 2, 65, 40), torch.randn(2, 4, 65)

    def attend(q, k, v, bias, mask):
        out, lse = hop(q, k, v, bias, mask)
        return torch.cat([out, lse.masked_fill(lse == -torch.inf, 0)[..., None].to(out.dtype)], -1)

    inputs = [t.to("cuda", dtype).requires_grad_() for t in (q, k, v, bias)]
    doubles = [t.detach().cpu().double().requires_grad_() for t in inputs]
    found = attend(*inputs, placed(mask))
    with plain():
        wanted = attend(*doubles, mask)
    assert off(found.cpu(), wanted) < NEAR[dtype]
    weights = torch.randn(wanted.shape)
    ours = torch.autograd.grad((found * weights.to(found)).sum(), inputs)
    theirs = torch.autograd.grad((wanted * weights).sum(), doubles)
    for one, other in zip(ours, theirs, strict=True):
        assert off(one.cpu(), other) < 3 * NEAR[dtype]


@pytest.mark.parametrize(
    "kind, mask",
    [pytest.param(m, mask, id=f"{m.__name__}, {n}") for m in ALL for n, mask in MASKS.items() if mask.demands <= m.supports],
)
def test_a_mechanism_gives_what_it_gives_on_the_cpu(kind, mask):
    mechanism, given = build(kind), tensors()
    wanted = mechanism(*given, mask)
    there = [t.cuda() for t in given]
    here = mechanism.to("cuda")
    assert off(here(*there, placed(mask)).cpu(), wanted) < 2e-5
    slopes = gradients(lambda q, k, v: here(q, k, v, placed(mask)), *there)
    assert all(torch.isfinite(slope).all() for slope in slopes)


@pytest.mark.parametrize("kind", named(m for m in ALL if "state" in m.supports))
def test_a_state_lives_where_its_tokens_are(kind):
    mechanism, (q, k, v) = build(kind).to("cuda"), (t.cuda() for t in tensors())
    _, state = mechanism.decode(q[:, :, :40], k[:, :, :40], v[:, :, :40])
    out, _ = mechanism.decode(q[:, :, 40:], k[:, :, 40:], v[:, :, 40:], state)
    assert off(out.cpu(), mechanism(q, k, v, Mask(causal=True))[:, :, 40:].cpu()) < 2e-5


@pytest.mark.parametrize("name", EXTRAS)
@pytest.mark.parametrize("kind", named(m for m in ALL if {"cap", "null"} <= m.supports))
def test_caps_and_null_logits_too(kind, name):
    mechanism, given = build(kind), tensors()
    extra = EXTRAS[name]
    wanted = mechanism(*given, **extra)
    moved = {n: x.cuda() if isinstance(x, torch.Tensor) else x for n, x in extra.items()}
    assert off(mechanism.to("cuda")(*(t.cuda() for t in given), **moved).cpu(), wanted) < 2e-5


@pytest.mark.parametrize("rows", [None, 8])
@pytest.mark.parametrize("make", [bert, llama])
def test_a_scan_finds_what_it_finds_on_the_cpu(make, rows):
    texts = [words(20 + i, i) for i in range(4)]
    here = make()
    wanted = scan(here, texts, rows=rows)
    found = scan(Checkpoint(here.model.cuda(), here.processor), texts, rows=rows)
    for layer, columns in wanted.results().items():
        for name, (value, _) in columns.items():
            there = found.results()[layer][name].value.cpu()
            assert torch.allclose(there, value, rtol=1e-3, atol=1e-4, equal_nan=True), (layer, name)


def layer(device):
    source = torch.Generator().manual_seed(5)
    x, *weights = (
        torch.randn(*shape, generator=source, dtype=torch.float64).to(device) / 3 for shape in [(24, 16)] + 4 * [(16, 16)]
    )
    return x, exact.Layer(*weights, heads=2)


EXACT = {
    "jacobian": lambda x, w: exact.attention_jacobian(x, w),
    "push": lambda x, w: exact.attention_jvp(x, x.flip(0), w),
    "pull": lambda x, w: exact.attention_vjp(x, x.flip(0), w),
    "lipschitz": lambda x, w: torch.tensor(exact.local_lipschitz(x, w).value),
    "mean": lambda x, w: exact.residual(x),
    "l1": lambda x, w: exact.residual(x, "l1"),
    "dobrushin": lambda x, w: exact.dobrushin((x @ x.mT).softmax(-1)),
    "softmax": lambda x, w: exact.softmax_jacobian_norm(x.softmax(-1)),
}


@pytest.mark.parametrize("default", ["cpu", "cuda"])
@pytest.mark.parametrize("name", EXACT)
def test_closed_forms_give_the_same_whatever_the_default_device(name, default):
    wanted = EXACT[name](*layer("cpu"))
    given = layer("cuda")
    with torch.device(default):
        found = EXACT[name](*given)
    assert torch.allclose(torch.as_tensor(found).cpu().double(), torch.as_tensor(wanted).double(), atol=1e-8)
