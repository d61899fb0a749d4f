"""How much the model's output depends on each KV head: the metric in which preset "sensitivity" measures errors.

The paper minimises the squared error of K and V, but what counts is the output. To second order, an error d of what is
cached for a token moves the distribution of the tokens after it by a KL divergence of d^T F d / 2, where F is the
Fisher information: the mean of g g^T, g being the gradient of the log-probability of tokens drawn from that
distribution. One backward pass through a short continuation gives g for all layers, heads and tokens of its context, so
that nothing has to be probed one by one. Of F the block of every layer and KV head is kept, averaged over tokens.
Weighting the centred features of a head by the square root of its block turns the error that matters into a squared
error, which the PCA and the bit allocation then minimise, for K and V in the same unit.

The second order overrates errors as large as those of high ratios: the blocks are raised to a power below 1, which
moves bits from the most sensitive directions to all others. On SmolLM2-135M powers 1, 0.75 and 0.5 give a KL of .0018,
.0018, .0021 at target ratio 16 and of .0183, .0151, .0167 at 64.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from sglang_kvtc.artifact.schema import RopeSpec
from sglang_kvtc.calibrate.causal_lm import filled_cache, prefill
from sglang_kvtc.calibrate.collect import SINK_TOKENS
from sglang_kvtc.calibrate.corpus import TokenSequence
from sglang_kvtc.calibrate.progress import Progress
from sglang_kvtc.calibrate.work_dir import SensitivityFile
from sglang_kvtc.codec.rope import rotate
from sglang_kvtc.errors import ConfigError

NUM_SEQUENCES = 20
"""Sequences that are enough: the block of a head is a mean over some thousand tokens of them."""
CONTINUATION_ONE_IN = 6
"""One token in so many of a sequence continues the rest, whose cache is what errors are imagined in."""
_DRAWS = 2
"""Continuations that are drawn per sequence: a backward pass each, of one forward pass."""
_WINDOW_TOKENS = 128
"""Last tokens of the context that are left out, as they are not coded; at most one in eight of it."""
POWER = 0.75
"""What the information is raised to before errors are weighed by it."""
_SHRINKAGE = 0.1
"""Share of a head's mean information that is spread over its channels, so that none seems to be free of cost."""
_LEAST_INFORMATION = 1e-4
"""Least information of a head, relative to the mean of its side: one that is never attended to has none."""


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """Fisher information of K before RoPE and of V for the next token, averaged over cached and next tokens.

    k, v: f64[num_layers, num_kv_heads, head size, head size]. num_sequences: it was measured on. standard_error: of the
    trace of a block, relative to it, the median over all heads of both sides.
    """

    k: torch.Tensor
    v: torch.Tensor
    num_sequences: int
    standard_error: float

    def describe(self) -> str:
        """For the provenance of an artifact."""
        return (
            f"Fisher information on {self.num_sequences} sequences, standard error {self.standard_error:.0%} of a head"
        )

    def weights(self) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        """Square roots of POWER of the blocks of K and V, regularised, with one factor that makes them 1 on average.

        Symmetric and positive definite, in the shape of the blocks: SideBasis.weights of a whole model.
        """
        values, vectors = zip(*(torch.linalg.eigh(_regularised(side)) for side in (self.k, self.v)), strict=True)
        unit = torch.cat([side.flatten() for side in values]).log().mean().exp()
        k, v = (
            ((axes * ((eigenvalues / unit) ** (POWER / 2))[..., None, :]) @ axes.mT).float().numpy()
            for eigenvalues, axes in zip(values, vectors, strict=True)
        )
        return k, v


def _regularised(information: torch.Tensor) -> torch.Tensor:
    """Blocks without directions or heads that cost nothing."""
    head_dim = information.shape[-1]
    per_channel = information.diagonal(dim1=-2, dim2=-1).mean(dim=-1)
    least = _LEAST_INFORMATION * float(per_channel.mean())
    if least <= 0:
        raise ConfigError("the model's output does not depend on its KV cache: nothing can be weighted by it")
    spread = (_SHRINKAGE * per_channel).clamp(min=least)
    return (1 - _SHRINKAGE) * information + spread[..., None, None] * torch.eye(head_dim, dtype=information.dtype)


def sensitivity_sequences(sequences: Sequence[TokenSequence]) -> list[TokenSequence]:
    """The longest of `sequences`, NUM_SEQUENCES of them at most. Raises ConfigError if none can have a continuation."""
    longest = sorted(sequences, key=lambda sequence: -len(sequence.token_ids))[:NUM_SEQUENCES]
    usable = [sequence for sequence in longest if len(sequence.token_ids) > 2 * SINK_TOKENS]
    if not usable:
        length = len(longest[0].token_ids) if longest else 0
        raise ConfigError(f"the sensitivity of a model is measured on sequences, the longest has {length} tokens")
    return usable


def measure_sensitivity(
    model: Any,
    sequences: Sequence[TokenSequence],
    rope: RopeSpec,
    *,
    seed: int,
    progress: Progress,
    file: SensitivityFile | None = None,
) -> Sensitivity:
    """Measure it on all of `sequences` (see `sensitivity_sequences`).

    file: where to continue, and to keep what is measured after every sequence. Memory is that of a backward pass
    through a sixth of a sequence.
    """
    found = file.load() if file is not None else {}
    with progress.stage("sensitivity", len(sequences), "sequences") as advance:
        advance(done := len(found.get("traces", ())))
        for index, sequence in enumerate(sequences[done:], done):
            # One for each sequence, so that a continued run draws what an uninterrupted one would.
            generator = torch.Generator().manual_seed(seed * NUM_SEQUENCES + index)
            measured = _information(model, sequence.token_ids, rope, generator)
            if found:
                k, v = (found[name] + measured[name] for name in ("k", "v"))
                measured = {"k": k, "v": v, "traces": torch.cat([found["traces"], measured["traces"]])}
            found = measured
            if file is not None:
                file.save(found)
            advance(1)
    count = len(sequences)
    return Sensitivity(found["k"] / count, found["v"] / count, count, _standard_error(found["traces"]))


def _standard_error(traces: torch.Tensor) -> float:
    """traces: of the block of every head of both sides, f64[num_sequences, heads]."""
    if len(traces) < 2:
        return float("nan")
    errors = traces.std(dim=0) / len(traces) ** 0.5 / traces.mean(dim=0).clamp(min=torch.finfo(traces.dtype).tiny)
    return float(errors.median())


def _information(
    model: Any, token_ids: Sequence[int], rope: RopeSpec, generator: torch.Generator
) -> dict[str, torch.Tensor]:
    """Information of one sequence, `k` and `v`: f64[num_layers, num_kv_heads, head size, head size]; and their traces,
    f64[1, heads of both].
    """
    num_continuation = len(token_ids) // CONTINUATION_ONE_IN
    num_context = len(token_ids) - num_continuation
    # Copies: what inference mode made cannot be differentiated by.
    keys, values = (cache.clone().requires_grad_() for cache in prefill(model, token_ids[:num_context]))
    input_ids = torch.tensor([token_ids[num_context:]], device=model.device)
    cache = filled_cache(model, keys, values)
    log_probs = model(input_ids=input_ids, past_key_values=cache, use_cache=True).logits[0].float().log_softmax(dim=-1)
    probabilities = log_probs.detach().exp().cpu()
    coded = slice(SINK_TOKENS, num_context - min(_WINDOW_TOKENS, num_context // 8))
    found = []
    for draw in range(_DRAWS):
        drawn = torch.multinomial(probabilities, 1, generator=generator).to(model.device)
        log_prob = log_probs.gather(1, drawn).sum()
        gradients = torch.autograd.grad(log_prob, (keys, values), retain_graph=draw < _DRAWS - 1)
        k, v = (gradient.float().cpu() for gradient in gradients)
        # The rotation is orthogonal up to its factor, which undoing divides by and a gradient is multiplied by.
        k = rotate(k, torch.arange(num_context), rope, inverse=True) * rope.attention_factor**2
        found.append((_outer_mean(k[:, coded]), _outer_mean(v[:, coded])))
    # What is drawn for one token says nothing about another, so the information of all of them is a sum.
    k, v = (torch.stack(side).mean(dim=0) / num_continuation for side in zip(*found, strict=True))
    traces = torch.cat([side.diagonal(dim1=-2, dim2=-1).sum(dim=-1).flatten() for side in (k, v)])
    return {"k": k, "v": v, "traces": traces[None]}


def _outer_mean(gradients: torch.Tensor) -> torch.Tensor:
    """Mean of g g^T over tokens, by layer and head. gradients: f32[num_layers, num_tokens, num_kv_heads, head size]."""
    by_head = gradients.transpose(1, 2)
    return (by_head.mT @ by_head).double() / gradients.shape[1]
