"""Scoring for serving: all projections of a layer in one product of a low-precision dtype, the rest in fp32."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch

from sglang_kvtc.errors import ConfigError
from sglang_kvtc.gates.model import RMS_EPSILON, BiasForm, Gates, SinkAttentionGates

if TYPE_CHECKING:
    from sglang_kvtc.gates.fused import FusedSinkAttention

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
BACKENDS = ("numba", "torch")
"""numba: fused.py, for sink attention on the CPU. torch: every kind on every device, and the oracle of the other."""
BLOCK_TOKENS = 2048
"""Tokens, summed over layers, that are scored at once: what they need stays in the caches of the cores."""
_LARGEST_EXPONENT = 60.0
"""Of exponentials summed without subtracting their maximum: fp32 has room for 1,024 sinks either way."""

_logger = logging.getLogger(__name__)


class GateScorer:
    """Scores of tokens by trained gates, for inference. Nothing changes after construction, so threads may share one.

    No operation depends on positions, and with torch none on values: shapes follow from those of the inputs, so that a
    call can be captured in a CUDA graph. Inputs and scores lie on the device of the gates. `backend`, one of BACKENDS,
    is chosen at construction and does not change.
    """

    def __init__(self, gates: Gates, dtype: torch.dtype, backend: str | None = None) -> None:
        """Copy the parameters of sink-attention gates; gates of other kinds are used as they are, in fp32.

        dtype: of the projections, where most of the time goes: the model's, where the device multiplies it in hardware.
        backend: one of BACKENDS, or None for numba where it serves the gates and torch elsewhere. The first scorer of a
        process with numba loads a compiled loop, or compiles it, which takes seconds.
        Raises ConfigError for a dtype that is none of DTYPES, and for a backend that is none of BACKENDS or does not
        serve the gates.
        """
        if dtype not in DTYPES:
            raise ConfigError(f"gates cannot be scored in {dtype}: expected one of {', '.join(map(str, DTYPES))}")
        if backend is not None and backend not in BACKENDS:
            raise ConfigError(f"gates cannot be scored by {backend!r}: expected one of {', '.join(BACKENDS)}")
        if backend == "numba" and not isinstance(gates, SinkAttentionGates):
            raise ConfigError(f"gates: numba scores sink attention, and these gates are {gates.config.kind}")
        self.config = gates.config
        self.dtype = dtype
        self._fused: FusedSinkAttention | None = None
        with torch.no_grad():
            if backend != "torch" and isinstance(gates, SinkAttentionGates):
                self._fused = _new_fused(gates, dtype, is_required=backend == "numba")
            if self._fused is None:
                self._block = _SinkAttention(gates, dtype) if isinstance(gates, SinkAttentionGates) else gates
        self.backend = "torch" if self._fused is None else "numba"

    def score(self, layer: int, inputs: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Score tokens of one layer.

        inputs: float[num_tokens, input_features], converted to the dtype of the projections. out: f32[num_tokens,
        num_kv_heads] of any strides, to be written and returned. Returns f32[num_tokens, num_kv_heads] in [0, 1]:
        higher = keep. Raises ConfigError for a layer without gates and for other shapes.
        """
        if not 0 <= layer < self.config.num_layers:
            raise ConfigError(f"gates: there is no layer {layer}, expected 0 to {self.config.num_layers - 1}")
        out = self._check(inputs, (), out)
        if self._fused is not None:
            self._fused.score(layer, inputs, out)
            return out
        return out.copy_(self._score(slice(layer, layer + 1), inputs[None])[0])

    def score_layers(self, inputs: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Score tokens of all layers.

        inputs: float[num_layers, num_tokens, input_features]; out and result: f32[num_layers, num_tokens,
        num_kv_heads], otherwise as in `score`.
        """
        num_layers = self.config.num_layers
        out = self._check(inputs, (num_layers,), out)
        if self._fused is not None:
            for layer in range(num_layers):
                self._fused.score(layer, inputs[layer], out[layer])
            return out
        step = max(1, BLOCK_TOKENS // max(1, inputs.shape[1]))
        for first in range(0, num_layers, step):
            layers = slice(first, first + step)
            out[layers] = self._score(layers, inputs[layers])
        return out

    def _check(self, inputs: torch.Tensor, leading: tuple[int, ...], out: torch.Tensor | None) -> torch.Tensor:
        """`out`, or a new one; ConfigError where it or the inputs are not what the compiled loop reads and writes."""
        num_tokens = inputs.shape[-2] if inputs.ndim == len(leading) + 2 else 0
        expected = (*leading, num_tokens, self.config.input_features)
        if inputs.shape != expected:
            raise ConfigError(f"gates: inputs are {_text(inputs)}, expected {[*leading, 'tokens', expected[-1]]}")
        shape = (*leading, num_tokens, self.config.num_kv_heads)
        if out is None:
            return inputs.new_empty(shape, dtype=torch.float32)
        if out.shape != shape or out.dtype != torch.float32:
            raise ConfigError(f"gates: out is {_text(out)}, expected torch.float32 {list(shape)}")
        return out

    def _score(self, layers: slice, inputs: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            scores: torch.Tensor = self._block(inputs, layers)
        return scores


def _text(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"


def _new_fused(gates: SinkAttentionGates, dtype: torch.dtype, is_required: bool) -> FusedSinkAttention | None:
    """None where numba does not serve these gates and need not: ConfigError otherwise."""
    if gates.q_weight.is_cpu or is_required:
        # Here, since importing numba takes a second that gates on other devices need not spend.
        from sglang_kvtc.gates.fused import FusedSinkAttention

        try:
            return FusedSinkAttention(gates, dtype)
        except ConfigError as error:
            if is_required:
                raise
            _logger.info("gates are scored by torch, several times more slowly: %s", error)
    return None


class _SinkAttention:
    """SinkAttentionGates in another order of operations.

    Everything is laid out with the token last, so that sums over channels run along whole vectors. Both norms divide
    by a number per token and head, which is applied to the dot products instead of the vectors, and their weights go
    into the sinks and into one factor of q.k. RMS norm: x / sqrt(mean + eps) = sqrt(d) x / sqrt(sum + d eps).
    """

    def __init__(self, gates: SinkAttentionGates, dtype: torch.dtype) -> None:
        config = gates.config
        heads, group, dim = config.num_kv_heads, config.group_size, config.gate_dim
        self._config = config
        self._epsilon = RMS_EPSILON * dim
        scale = 1.0 if config.bias_form is BiasForm.PAPER else dim**-0.5

        # Rows (head, channel, member), where the key is one more member of its group of queries.
        q_weight = gates.q_weight.view(-1, heads, group, dim, config.input_features).transpose(2, 3)
        k_weight = gates.k_weight.view(-1, heads, dim, 1, config.input_features)
        self._weight = torch.cat([q_weight, k_weight], dim=3).flatten(1, 3).to(dtype)
        q_bias = gates.q_bias.view(-1, heads, group, dim).transpose(2, 3)
        self._q_bias = q_bias.float().unsqueeze(-1).clone()
        own_weight = gates.q_norm * gates.k_norm * (dim * scale)
        self._own_weight = own_weight.float()[:, None, :, None, None]
        sinks = gates.sinks * gates.q_norm[:, None, None] * (dim**0.5 * scale)
        self._sinks = sinks.float().contiguous()
        self._bias = gates.bias.float()[..., None].clone()
        self._paper_denominator = self._bias.exp()
        # These sinks are multiplied by vectors no longer than 1, so no product is larger than the longest sink.
        largest = self._sinks.norm(dim=-1).amax() if config.num_sinks else torch.zeros(())
        self._is_small = bool(largest <= _LARGEST_EXPONENT) and bool(self._bias.abs().amax() <= _LARGEST_EXPONENT)

    def __call__(self, inputs: torch.Tensor, layers: slice) -> torch.Tensor:
        """float[num_layers, num_tokens, input_features] -> f32[num_layers, num_tokens, num_kv_heads], a view."""
        config = self._config
        num_layers, num_tokens, _ = inputs.shape
        group, dim = config.group_size, config.gate_dim
        weight = self._weight[layers]
        projected = torch.bmm(weight, inputs.to(weight.dtype).transpose(1, 2)).float()
        members = projected.view(num_layers, config.num_kv_heads, dim, group + 1, num_tokens)
        queries, key = members[:, :, :, :group], members[:, :, :, group:]
        queries += self._q_bias[layers]

        # A product, since torch's square is twice as slow.
        inverse_norm = (members * members).sum(dim=2).add_(self._epsilon).rsqrt_()
        own = (queries * (key * self._own_weight[layers])).sum(dim=2)
        own *= inverse_norm[:, :, :group]
        own *= inverse_norm[:, :, group:]
        if config.bias_form is BiasForm.RELEASED:
            own += self._bias[layers]
        others = self._log_of_others(queries, inverse_norm[:, :, :group], layers)
        if others is not None:
            own -= others
        return own.sigmoid_().mean(dim=2).transpose(1, 2)

    def _log_of_others(self, queries: torch.Tensor, inverse_norm: torch.Tensor, layers: slice) -> torch.Tensor | None:
        """Logarithm of the denominator without the token's own term: f32[layers, heads, group, tokens], or None for 0.

        queries: f32[layers, heads, dim, group, tokens]; inverse_norm: f32[layers, heads, group, tokens].
        """
        config = self._config
        is_paper = config.bias_form is BiasForm.PAPER
        if not config.num_sinks:
            return self._bias[layers].expand_as(inverse_norm) if is_paper else None
        sinks = self._sinks[layers].flatten(0, 1)
        products = torch.bmm(sinks, queries.flatten(3).flatten(0, 1))
        products = products.view(*inverse_norm.shape[:2], config.num_sinks, *inverse_norm.shape[2:])
        products *= inverse_norm[:, :, None]
        if self._is_small:
            total = products.exp_().sum(dim=2)
            return (total + self._paper_denominator[layers]).log_() if is_paper else total.log_()
        log_total = products.logsumexp(dim=2)
        return torch.logaddexp(log_total, self._bias[layers]) if is_paper else log_total
