"""Log-probabilities and entropy of sampled tokens from hidden states, the vocabulary split over TP ranks.

The output layer and the softmax are one function, run in tiles of tokens and vocabulary: logits exist for one tile
at a time, only at positions where a token was sampled, and never as a full float32 copy.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from agentrl.trainer.tiles import is_kept, tiles


@dataclass(frozen=True)
class VocabShard:
    """This rank's part of the vocabulary: ``[start, start + size)``, without padding rows."""

    start: int
    size: int
    group: dist.ProcessGroup | None = None

    @property
    def split(self) -> bool:
        return self.group is not None and self.group.size() > 1


def log_probs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    shard: VocabShard,
    *,
    temperature: float = 1.0,
    entropy: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """log softmax(hidden @ weight.T / temperature) at ``targets``, and the entropy of the softmax.

    Args:
        hidden: [N, h] states that predict the targets, equal on all ranks of ``shard.group``. Its
            gradient is this rank's part; sum it over the group (Megatron's mappings do).
        weight: [rows, h] of this rank; rows beyond ``shard.size`` are padding and ignored. Its gradient is summed in
            float32 over the tiles: into ``weight.main_grad`` where Megatron has put one (``weight.grad`` then is 0).
        targets: int64[N] in the whole vocabulary.
        entropy: also compute the entropy, with gradient.

    Returns:
        float32[N], and float32[N] or None.
    """
    values, entropies = _LinearLogProb.apply(hidden, weight, targets, shard, 1.0 / temperature, entropy)
    return values, entropies if entropy else None


class _LinearLogProb(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, whole, targets, shard, inverse_temperature, want_entropy):
        weight = whole[: shard.size]
        n, vocab = hidden.shape[0], weight.shape[0]
        local = targets - shard.start
        here = (local >= 0) & (local < vocab)
        local = torch.where(here, local, 0)
        blocks, parts = tiles(n, vocab, weight.device.type)
        keep = ctx.needs_input_grad[0] and is_kept(n, vocab, weight.device.type)
        # lse: of this rank's logits; picked: logit of the target; mean: of the logits under softmax
        lse, picked, mean = (hidden.new_zeros(n, dtype=torch.float32) for _ in range(3))
        kept = []
        for rows in blocks:
            # The largest logit so far, and sums with it subtracted, as tiles go by.
            largest = hidden.new_full((rows.stop - rows.start, 1), -torch.inf, dtype=torch.float32)
            total, weighted = torch.zeros_like(largest), torch.zeros_like(largest)
            for columns in parts:
                logits = _logits(hidden[rows], weight[columns], inverse_temperature)
                at, own = _inside(local[rows], columns)
                picked[rows] += logits.gather(1, at).squeeze(1) * own
                before, largest = largest, torch.maximum(largest, logits.amax(1, keepdim=True))
                shrink = torch.exp(before - largest)
                # The entropy needs the logits once more; otherwise they are overwritten.
                probs = (logits - largest).exp_() if want_entropy else logits.sub_(largest).exp_()
                total = total * shrink + probs.sum(1, keepdim=True)
                if want_entropy:
                    weighted = weighted * shrink + torch.bmm(probs[:, None, :], logits[:, :, None]).squeeze(2)
            lse[rows] = (largest + total.log()).squeeze(1)
            mean[rows] = (weighted / total).squeeze(1)
            if keep:
                kept.append(probs.div_(total))
        share = None
        if shard.split and n:
            lse, picked, mean, share = _combine(lse, picked * here, mean, shard.group)
        ctx.kept, ctx.shard, ctx.scale = kept, shard, inverse_temperature
        result = picked - lse
        entropy = lse - mean if want_entropy else hidden.new_empty(0)
        ctx.save_for_backward(hidden, whole, local, here, share, lse, entropy)
        ctx.main_grad = getattr(whole, "main_grad", None)
        ctx.want_entropy = want_entropy
        return result, entropy

    @staticmethod
    def backward(ctx, grad, grad_entropy):
        hidden, whole, local, here, share, lse, entropy = ctx.saved_tensors
        weight = whole[: ctx.shard.size]
        grad = grad.float()
        on_target = grad * here
        blocks, parts = tiles(hidden.shape[0], weight.shape[0], weight.device.type)
        # In the weight's own precision the error would grow with the number of tiles.
        grad_hidden = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
        total = ctx.main_grad
        if total is None:
            total = torch.zeros(whole.shape, dtype=torch.float32, device=whole.device)
        kept = iter(ctx.kept)
        ctx.kept = ()
        for rows in blocks:
            factor = -grad[rows, None]
            for columns in parts:
                part = weight[columns]
                probs = next(kept, None)
                if probs is None:
                    probs = _logits(hidden[rows], part, ctx.scale).sub_(lse[rows, None]).exp_()
                elif share is not None:
                    probs.mul_(share[rows, None])
                if ctx.want_entropy:
                    # d entropy / d logit_j = -p_j (log p_j + entropy)
                    surprise = probs.clamp_min(torch.finfo(torch.float32).tiny).log_()
                    surprise.add_(entropy[rows, None]).mul_(-grad_entropy[rows, None].float())
                    probs.mul_(surprise.add_(factor))
                else:
                    probs.mul_(factor)
                at, own = _inside(local[rows], columns)
                probs.scatter_add_(1, at, (on_target[rows] * own)[:, None])
                if ctx.scale != 1.0:
                    probs.mul_(ctx.scale)
                probs = probs.to(weight.dtype)
                _add_product(grad_hidden[rows], probs, part)
                _add_product(total[columns], probs.t(), hidden[rows])
        # Megatron adds what is returned to main_grad, so that gradients of a tied embedding come together there.
        returned = total.to(whole.dtype) if ctx.main_grad is None else torch.zeros_like(whole)
        return grad_hidden.to(hidden.dtype), returned, None, None, None, None


def _logits(hidden: Tensor, weight: Tensor, inverse_temperature: float) -> Tensor:
    logits = (hidden @ weight.t()).float()
    return logits if inverse_temperature == 1.0 else logits.mul_(inverse_temperature)


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add ``a @ b`` to a float32 tensor."""
    if a.dtype is total.dtype:
        total.addmm_(a, b)
    else:
        total.add_(a @ b)


def _inside(local: Tensor, columns: slice) -> tuple[Tensor, Tensor]:
    """Where the targets stand in a tile, int64[n, 1], and whether they do, bool[n]."""
    at = local - columns.start
    own = (at >= 0) & (at < columns.stop - columns.start)
    return torch.where(own, at, 0)[:, None], own


def _combine(lse: Tensor, picked: Tensor, mean: Tensor, group) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Global log-sum-exp, target logit and mean logit from those of the ranks, in two collectives."""
    largest = lse.clone()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    mass = torch.exp(lse - largest)
    both = torch.stack([mass, picked, mass * mean])
    dist.all_reduce(both, group=group)
    total = both[0]
    return largest + total.log(), both[1], both[2] / total, mass / total
