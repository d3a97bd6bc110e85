"""The hop by torch's own fused attention kernels, on CPU and CUDA: (out, lse) forward, and both of them differentiated."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from ..mask import Mask
from .again import differentiated
from .formula import tiled

BLOCK = 512  # queries that share one tile of a mask the kernels do not know
TINY = 1e-33  # a square in float32 that is still exact
aten = torch.ops.aten


class FusedHop(torch.autograd.Function):
    """A hop in one kernel call, or in one for each block of queries where the mask must be spelled out.

    The kernels give no gradient through lse nor for the bias. One more column carries both through the backward pass: where q's last
    column is 1/scale, k's and v's 0, grad_out's 1 and out's -grad_lse, the kernel's own delta = grad_out . out takes grad_lse along,
    and the last column of grad_k is the column sum of the logits' gradient, which is the bias's.
    """

    @staticmethod
    def forward(ctx, q, k, v, bias, mask: Mask, scale: float):
        out, lse, kept = None, None, []
        width = max(q.shape[-1], v.shape[-1])
        for rows, columns, causal, added in pieces(q, k, bias, mask):
            here, keys, values = (_widen(t, width) for t in (q[:, :, rows], k[:, :, columns], v[:, :, columns]))
            part, raw, rest = _forward(here, keys, values, added, causal, scale)
            blind = _blind(added, causal, rows)
            part, sums = (
                _zeroed(part[..., : v.shape[-1]], blind),
                raw.clone() if blind is None else raw.masked_fill(blind, -torch.inf),
            )
            kept.append((raw, rest))
            if rows.stop - rows.start == q.shape[2]:
                out, lse = part, sums
                break
            if out is None or lse is None:
                out, lse = q.new_empty(*q.shape[:3], v.shape[-1]), q.new_empty(q.shape[:3], dtype=torch.float32)
            out[:, :, rows], lse[:, :, rows] = part, sums
        ctx.save_for_backward(q, k, v, bias, out)
        ctx.mask, ctx.scale, ctx.kept = mask, scale, kept
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx, *grads):
        q, k, v, bias, out = ctx.saved_tensors
        grad, grad_lse = grads
        if grad is None and grad_lse is None:
            return (None,) * 6
        if torch.is_grad_enabled():  # a second derivative is wanted
            mask, scale = ctx.mask, ctx.scale
            return *differentiated(lambda q, k, v, bias: tiled(q, k, v, bias, mask, scale), (q, k, v, bias), grads), None, None
        grad = torch.zeros_like(out) if grad is None else grad
        bias_learns = bias is not None and ctx.needs_input_grad[3]
        if grad_lse is not None and not bias_learns:
            out, grad_lse = _leant(out, grad, grad_lse)
        width = max(q.shape[-1], v.shape[-1]) + int(grad_lse is not None or bias_learns)
        gq, gk, gv = torch.empty_like(q), None, None
        gb = torch.zeros(*q.shape[:2], k.shape[-2], device=q.device) if bias_learns else None
        for (rows, columns, causal, added), (raw, rest) in zip(pieces(q, k, bias, ctx.mask), ctx.kept, strict=True):
            blind = _blind(added, causal, rows)
            here, keys, values = (_widen(t, width) for t in (q[:, :, rows], k[:, :, columns], v[:, :, columns]))
            given, answer = _widen(_zeroed(grad[:, :, rows], blind), width), _widen(out[:, :, rows], width)
            if grad_lse is not None or bias_learns:
                here[..., -1], given[..., -1] = 1 / ctx.scale, 1
                answer[..., -1] = 0 if grad_lse is None else -grad_lse[:, :, rows].to(answer.dtype)
                if blind is not None:
                    given[..., -1].masked_fill_(blind, 0)
            dq, dk, dv = _backward(given, here, keys, values, answer, raw, added, causal, ctx.scale, rest)
            gq[:, :, rows] = dq[..., : q.shape[-1]]
            gk = _added_to(gk, k, columns, _shared(dk[..., : k.shape[-1]], k.shape[1]))
            gv = _added_to(gv, v, columns, _shared(dv[..., : v.shape[-1]], v.shape[1]))
            if gb is not None:
                gb[:, :, columns] += dk[..., -1]
        return gq, gk, gv, None if gb is None or bias is None else gb.sum_to_size(bias.shape).to(bias.dtype), None, None


def pieces(q: Tensor, k: Tensor, bias: Tensor | None, mask: Mask) -> Iterator[tuple[slice, slice, bool, Tensor | None]]:
    """(queries, keys, whether the kernel's own causal rule holds, what is added to the logits) for each kernel call."""
    queries, keys = q.shape[-2], k.shape[-2]
    dtype = torch.float32 if q.device.type == "cpu" else q.dtype  # the CPU kernel adds in full precision
    per_key = None if bias is None else bias.to(dtype)[..., None, :]
    if mask.demands <= {"causal", "keys"} and not (mask.causal and mask.offset):
        added = _plus(per_key, _padding(mask.keys, dtype))
        yield slice(0, queries), slice(0, keys), mask.causal, added
        return
    for start in range(0, queries, BLOCK):
        rows, columns = slice(start, min(start + BLOCK, queries)), slice(*mask.reach(start, min(start + BLOCK, queries), keys))
        if columns.start == columns.stop:
            columns = slice(0, keys)  # a kernel needs a key; the tile hides it
        tile = mask.tile(torch.arange(rows.start, rows.stop, device=q.device), columns.start, columns.stop)
        here = per_key[..., columns] if per_key is not None else None
        yield rows, columns, False, _plus(here, None if tile is None else tile.to(dtype))


def _padding(keys: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    if keys is None or bool(keys.all()):
        return None
    return torch.zeros(keys.shape, dtype=dtype, device=keys.device).masked_fill_(~keys, -torch.inf)[:, None, None]


def _plus(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return b if a is None else a if b is None else a + b


def _leant(out: Tensor, grad: Tensor, grad_lse: Tensor) -> tuple[Tensor, Tensor | None]:
    """out with grad_lse taken off its product with grad, which is all that a CPU kernel uses out for; or both as they were.

    This spares the column, and with it a copy of everything, wherever no row of grad is too small to carry it.
    """
    if out.device.type != "cpu" or out.dtype != torch.float32:
        return out, grad_lse
    square = torch.linalg.vecdot(grad, grad)
    if bool(((square < TINY) & (grad_lse != 0)).any()):
        return out, grad_lse
    return out.addcmul(grad, (grad_lse / square.clamp_min(TINY))[..., None], value=-1), None


def _blind(added: Tensor | None, causal: bool, rows: slice) -> Tensor | None:
    """Which queries see no key at all, (batch or 1, heads or 1, queries or 1); None where all see one."""
    if added is None:
        return None
    hidden = added == -torch.inf
    blind = hidden.all(-1) if not causal else hidden[..., 0, :].cummin(-1).values
    if causal and blind.shape[-1] != rows.stop - rows.start:  # beyond the last key a query sees what the last one sees
        position = torch.arange(rows.start, rows.stop, device=added.device).clamp_max(blind.shape[-1] - 1)
        blind = blind[..., position]
    return blind if bool(blind.any()) else None


def _zeroed(tensor: Tensor, blind: Tensor | None) -> Tensor:
    return tensor if blind is None else tensor.masked_fill(blind[..., None], 0)


def _widen(tensor: Tensor, width: int) -> Tensor:
    return F.pad(tensor, (0, width - tensor.shape[-1])) if width > tensor.shape[-1] else tensor


def _added_to(total: Tensor | None, like: Tensor, columns: slice, part: Tensor) -> Tensor:
    """The gradient of keys summed over the kernel calls; where one call saw all keys its own is taken as it is."""
    if total is None and part.shape == like.shape:
        return part
    total = torch.zeros_like(like) if total is None else total
    total[:, :, columns] += part
    return total


def _shared(grad: Tensor, heads: int) -> Tensor:
    """The gradient of key heads that several query heads shared."""
    return grad if grad.shape[1] == heads else grad.unflatten(1, (heads, -1)).sum(2)


def _forward(q: Tensor, k: Tensor, v: Tensor, added: Tensor | None, causal: bool, scale: float) -> tuple[Tensor, Tensor, tuple]:
    """(out, lse, what backward needs beside them); q, k and v have one width."""
    k, v = _spread(k, q), _spread(v, q)
    if q.device.type == "cpu":
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, attn_mask=added, scale=scale)
        return out, lse, ()
    width, (q, k, v) = q.shape[-1], (_widen(t, -(-q.shape[-1] // 8) * 8) for t in (q, k, v))
    if q.dtype != torch.float32 and added is None and q.shape[-1] <= 256 and not (causal and q.shape[-2] != k.shape[-2]):
        out, lse, *rest = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)
        return out[..., :width], lse, ("flash", *rest[:6])
    bias = None if added is None else _aligned(added, q, k)
    out, lse, seed, shift = aten._scaled_dot_product_efficient_attention(q, k, v, bias, True, 0.0, causal, scale=scale)
    return out[..., :width], lse[..., : q.shape[-2]], ("efficient", lse, seed, shift)


def _backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    added: Tensor | None,
    causal: bool,
    scale: float,
    rest: tuple,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of `_forward` for q, and for each query head's k and v."""
    k, v = _spread(k, q), _spread(v, q)
    if not rest:
        call = aten._scaled_dot_product_flash_attention_for_cpu_backward
        return call(grad, q, k, v, out, lse, 0.0, causal, attn_mask=added, scale=scale)
    width, room = q.shape[-1], -(-q.shape[-1] // 8) * 8
    grad, q, k, v, out = (_widen(t, room) for t in (grad, q, k, v, out))
    if rest[0] == "flash":
        *starts, state, unused = rest[1:]  # cumulative lengths and longest lengths of q and k, the random state
        call = aten._scaled_dot_product_flash_attention_backward
        found = call(grad, q, k, v, out, lse, *starts, 0.0, causal, state, unused, scale=scale)
    else:
        padded, seed, shift = rest[1:]
        dtype, (grad, q, k, v, out) = q.dtype, (t.float() for t in (grad, q, k, v, out))  # with a bias its half precision is wrong
        bias = None if added is None else _aligned(added, q, k)
        call = aten._scaled_dot_product_efficient_attention_backward
        wanted = [True, True, True, False]
        found = call(grad, q, k, v, bias, out, padded, seed, shift, 0.0, wanted, causal, scale=scale)[:3]
        found = tuple(g.to(dtype) for g in found)
    return tuple(g[..., :width] for g in found)  # type: ignore[return-value]


def _spread(t: Tensor, q: Tensor) -> Tensor:
    """Key heads as views, one for each query head."""
    if t.shape[1] == q.shape[1]:
        return t
    shared = q.shape[1] // t.shape[1]
    return t[:, :, None].expand(-1, -1, shared, -1, -1).reshape(t.shape[0], q.shape[1], *t.shape[2:])


def _aligned(added: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """The bias, its rows on 16-byte borders, expanded over batch, heads and queries without a copy."""
    keys = k.shape[-2]
    return F.pad(added.to(q.dtype), (0, -keys % 8))[..., :keys].expand(*q.shape[:3], keys)
