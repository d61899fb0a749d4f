"""Published ways to score the KV pairs of a context from its prefill, to compare gates with.

Each returns f32[num_layers, num_tokens, num_kv_heads]; higher means keep. They follow the papers with the settings of
kvpress 0.5.5, so that their numbers can be laid beside its own.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from sglang_kvtc.artifact.schema import RopeSpec
from sglang_kvtc.benchmarks.eviction import Context
from sglang_kvtc.codec.rope import Rotation
from sglang_kvtc.errors import ConfigError

SINK_TOKENS = 4
SNAPKV_WINDOW_TOKENS = 64
SNAPKV_KERNEL_TOKENS = 5
FUTURE_POSITIONS = 512
"""How far ahead expected attention looks."""
EXPECTED_ATTENTION_FLOOR = 1e-2
"""Added to the expected attention before it is multiplied with the norm of V, so that large values survive."""


def snapkv(context: Context) -> torch.Tensor:
    """Attention that the last 64 tokens pay, smoothed over neighbours (SnapKV, arXiv 2404.14469).

    The window itself is kept. Raises ConfigError for a context that is no longer than the window.
    """
    num_earlier = context.num_tokens - SNAPKV_WINDOW_TOKENS
    if num_earlier <= 0:
        raise ConfigError(
            f"SnapKV looks at the last {SNAPKV_WINDOW_TOKENS} tokens, but the context has {context.num_tokens}: "
            "use longer contexts or leave it out of --methods"
        )
    positions = torch.arange(context.num_tokens, device=context.keys.device)
    is_future = positions > positions[num_earlier:, None]
    scores = []
    for queries, keys, scaling in zip(context.queries, context.keys, context.scaling, strict=True):
        grouped = _by_kv_head(queries[num_earlier:], context)
        logits = torch.einsum("hgqd,khd->hgqk", grouped, keys.float()) * scaling
        attention = logits.masked_fill(is_future, -torch.inf).softmax(dim=-1)[..., :num_earlier]
        padding = SNAPKV_KERNEL_TOKENS // 2
        smooth = F.avg_pool1d(attention.mean(dim=2), SNAPKV_KERNEL_TOKENS, stride=1, padding=padding)
        scores.append(smooth.mean(dim=1).T)
    return _kept_above(torch.stack(scores), after=SNAPKV_WINDOW_TOKENS)


def streaming_llm(context: Context) -> torch.Tensor:
    """The first four and the most recent tokens (StreamingLLM, arXiv 2309.17453), at their original positions."""
    scores = torch.arange(context.num_tokens, dtype=torch.float32, device=context.keys.device) / context.num_tokens
    scores[:SINK_TOKENS] = 1.0
    return scores[:, None].expand(context.keys.shape[:3]).contiguous()


def key_norm(context: Context) -> torch.Tensor:
    """Keys of small L2 norm are kept (arXiv 2406.11430)."""
    norms: torch.Tensor = torch.linalg.vector_norm(context.keys, dim=-1, dtype=torch.float32)
    return -norms


def key_difference(context: Context) -> torch.Tensor:
    """Keys that point away from the mean direction are kept (KeyDiff, arXiv 2504.15364, over the whole context)."""
    directions = F.normalize(context.keys.float(), dim=-1)
    similarity: torch.Tensor = F.cosine_similarity(directions, directions.mean(dim=1, keepdim=True), dim=-1)
    return -similarity


def expected_attention(context: Context, rope: RopeSpec) -> torch.Tensor:
    """Attention that queries at the next 512 positions would pay, if drawn from a normal distribution like the
    context's own queries, times the norm of V (expected attention, arXiv 2510.00636). The first four tokens are kept.

    Raises ConfigError for a context of no more than these.
    """
    num_tokens = context.num_tokens
    if num_tokens <= SINK_TOKENS:
        raise ConfigError(f"expected attention needs more than {SINK_TOKENS} tokens of context, found {num_tokens}")
    unrotate = Rotation(torch.arange(SINK_TOKENS, num_tokens), rope, inverse=True)
    turn = _mean_rotation(range(num_tokens, num_tokens + FUTURE_POSITIONS), rope, context.queries.shape[-1])
    scores = []
    for queries, keys, values, scaling in zip(
        context.queries, context.keys, context.values, context.scaling, strict=True
    ):
        # Sinks are left out of the statistics too: what enters their layers is unlike all else.
        samples = _by_kv_head(unrotate(queries[SINK_TOKENS:].cpu()), context)
        mean = samples.mean(dim=2, keepdim=True)
        covariance = (samples - mean).transpose(2, 3) @ (samples - mean) / samples.shape[2]
        mean, covariance = mean @ turn.T, turn @ covariance @ turn.T

        # log E[exp(q.k)] of a normal q.
        heads = keys[SINK_TOKENS:].float().cpu().transpose(0, 1)[:, None] * scaling
        logits = (heads @ mean.transpose(2, 3))[..., 0] + ((heads @ covariance) * heads).sum(dim=-1) / 2
        expected = logits.softmax(dim=-1).mean(dim=1).T
        norms = torch.linalg.vector_norm(values[SINK_TOKENS:].float().cpu(), dim=-1)
        scores.append((expected + EXPECTED_ATTENTION_FLOOR) * norms)
    return _kept_above(torch.stack(scores).to(context.keys.device), before=SINK_TOKENS)


def random_scores(context: Context, seed: int) -> torch.Tensor:
    """Uniform scores: what any method has to beat. The same for the same context and seed."""
    generator = torch.Generator().manual_seed(seed + sum(context.token_ids))
    return torch.rand(context.keys.shape[:3], generator=generator).to(context.keys.device)


def keys_before_rope(context: Context, rope: RopeSpec) -> torch.Tensor:
    """The keys of a context without their rotation, f32[num_layers, num_tokens, num_kv_heads, head_dim], on the CPU."""
    return Rotation(torch.arange(context.num_tokens), rope, inverse=True)(context.keys.cpu())


def _by_kv_head(queries: torch.Tensor, context: Context) -> torch.Tensor:
    """[num_tokens, num_heads, head_dim] to f32[num_kv_heads, group size, num_tokens, head_dim]."""
    grouped: torch.Tensor = queries.float().unflatten(1, (-1, context.group_size))
    return grouped.permute(1, 2, 0, 3)


def _mean_rotation(positions: range, rope: RopeSpec, head_dim: int) -> torch.Tensor:
    """Mean over `positions` of the matrix that rotates a column vector: f32[head_dim, head_dim]."""
    units = torch.eye(head_dim)[:, None, None, :].expand(head_dim, len(positions), 1, head_dim)
    rotation = Rotation(torch.arange(positions.start, positions.stop), rope)
    return rotation(units).mean(dim=(1, 2)).T


def _kept_above(scores: torch.Tensor, before: int = 0, after: int = 0) -> torch.Tensor:
    """Add `before` tokens in front and `after` tokens behind that score higher than all others."""
    padded: torch.Tensor = F.pad(scores, (0, 0, before, after), value=float(scores.max()) + 1)
    return padded
