"""Sink-attention scores on the CPU: one matrix product per layer, and everything after it in one compiled loop.

What follows the projections is a dozen operations on small arrays, which torch would start one by one and each of which
would pass through memory. Here a block of tokens stays in the innermost cache from the projections to the score. The
arithmetic is that of score.py, with every exponent in units of log 2: exp(x) = 2^(x log2 e).
"""

from __future__ import annotations

import logging
import math
import threading

import numpy as np
import numpy.typing as npt
import torch
from numba import float32, int64, njit, types, uint32

from sglang_kvtc.errors import ConfigError
from sglang_kvtc.gates.model import RMS_EPSILON, BiasForm, SinkAttentionGates

BLOCK_TOKENS = 2048
"""Tokens whose projections are held at once."""
_LANES = 128
"""Tokens in the innermost loops: long enough to be vectors, short enough that those of a head fit the first cache."""
_UNROLL = 8
"""Channels that are summed in registers."""
_LOG2_E = math.log2(math.e)
_LARGEST_EXPONENT = 86.0
"""Of powers of two summed without subtracting their maximum: fp32 has room for 1,024 sinks either way."""

_ZERO, _ONE = np.float32(0), np.float32(1)
_LEAST_POWER, _LARGEST_POWER = np.float32(-126), np.float32(127)
# Added to x, it leaves round(x) + 127 in the lowest bits: the exponent of a float, once moved up.
_ROUND = np.float32(1.5 * 2**23 + 127)
# The polynomial of least relative error (1.9e-9) to 2^r for |r| <= 1/2, found by Remez' exchange; its constant is 1.
_P1, _P2, _P3 = np.float32(0.6931471824645996), np.float32(0.24022646248340607), np.float32(0.05550328642129898)
_P4, _P5 = np.float32(0.009618489071726799), np.float32(0.0013399930903688073)
_P6 = np.float32(0.0001534581242594868)
_EXPONENT_SHIFT, _HALF_WORD, _UPPER_HALF = np.uint32(23), np.uint32(16), np.uint32(0xFFFF0000)

_Floats = npt.NDArray[np.float32]
_Words = npt.NDArray[np.uint32]
_logger = logging.getLogger(__name__)
_compiling = threading.Lock()

# Sums keep their order and NaN stays NaN; only a product and a sum may become one instruction. Division by zero is
# that of IEEE: a check for Python's exception would keep loops from being vectors.
_compiled = njit(nogil=True, error_model="numpy", fastmath={"contract"})


class FusedSinkAttention:
    """Scores of SinkAttentionGates on the CPU. Nothing changes after construction, and calls release the GIL."""

    @torch.no_grad()
    def __init__(self, gates: SinkAttentionGates, dtype: torch.dtype) -> None:
        """Copy the parameters and compile the loop, which takes seconds where no earlier process left it in a cache.

        dtype: of the projections. Raises ConfigError for gates that lie on another device than the CPU, and for
        parameters that are not finite.
        """
        config = gates.config
        if gates.q_weight.device.type != "cpu":
            raise ConfigError(f"gates: numba scores on the cpu, and these gates lie on {gates.q_weight.device}")
        self._dtype = dtype
        self._dim, self._group = config.gate_dim, config.group_size
        self._heads = config.num_kv_heads
        is_paper = config.bias_form is BiasForm.PAPER
        scale = _LOG2_E * (1.0 if is_paper else self._dim**-0.5)

        # Rows (head, member, channel), where the key is the last member of its group of queries. An even number of
        # channels, since two bf16 are read as one word.
        shape = (config.num_layers, self._heads, -1, self._dim, config.input_features)
        weight = torch.cat([gates.q_weight.view(shape), gates.k_weight.view(shape)], dim=2)
        weight = torch.nn.functional.pad(weight, (0, 0, 0, self._dim % 2))
        # [layers, features, rows], the order in which the product reads them.
        self._weight = list(weight.flatten(1, 3).transpose(1, 2).to(dtype).contiguous())
        q_bias = _floats(gates.q_bias.view(-1, self._heads, self._group, self._dim))
        own_weight = _floats(gates.q_norm * gates.k_norm * (self._dim * scale))
        sinks = gates.sinks * gates.q_norm[:, None, None] * (self._dim**0.5 * scale)
        sinks = _floats(torch.nn.functional.pad(sinks, (0, -self._dim % _UNROLL)))
        bias = gates.bias * _LOG2_E
        # The sum of the denominator begins with what its form adds to the sinks.
        absent = 0.0 if not config.num_sinks else -math.inf
        log_first = bias if is_paper else torch.full_like(bias, absent)
        own_bias = _floats(torch.zeros_like(bias) if is_paper else bias)
        used: dict[str, torch.Tensor | _Floats] = {"weight": torch.stack(self._weight), "own_weight": own_weight}
        used["sinks"] = sinks
        for name, values in {**used, "q_bias": q_bias, "bias": own_bias}.items():
            if not np.isfinite(_as_numpy(values)).all():
                raise ConfigError(f"gates: {name} is not finite, which numba does not score; torch does")
        # Sinks are multiplied by vectors no longer than 1, so no product is larger than the longest sink.
        largest = float(np.linalg.norm(sinks.astype(np.float64), axis=-1).max(initial=0.0))
        self._is_small = max(largest, float(bias.abs().amax())) <= _LARGEST_EXPONENT
        by_parameter = (q_bias, own_weight, own_bias, sinks, _floats(log_first.exp2()), _floats(log_first))
        self._parameters = list(zip(*by_parameter, strict=True))
        self._local = threading.local()
        _compile()

    @torch.no_grad()
    def score(self, layer: int, inputs: torch.Tensor, out: torch.Tensor) -> None:
        """Score tokens of one layer.

        inputs: float[num_tokens, input_features] on the CPU, of any strides, converted to the dtype of the projections.
        out: f32[num_tokens, num_kv_heads] on the CPU, of any strides, written: higher = keep. The caller has checked
        both shapes.
        """
        # Between large operations every small one costs tens of microseconds: what a layer needs not, is left out.
        scores = (out.detach() if out.requires_grad else out).numpy()
        if len(inputs) <= BLOCK_TOKENS:
            self._score_block(layer, inputs, scores)
            return
        for first in range(0, len(inputs), BLOCK_TOKENS):
            block = slice(first, first + BLOCK_TOKENS)
            self._score_block(layer, inputs[block], scores[block])

    def _score_block(self, layer: int, inputs: torch.Tensor, scores: _Floats) -> None:
        projected, words = self._projections(len(inputs))
        torch.mm(inputs if inputs.dtype == self._dtype else inputs.to(self._dtype), self._weight[layer], out=projected)
        is_packed = words is not None
        if words is None:
            words = _as_words(projected.float())
        _score(words, is_packed, self._dim, *self._parameters[layer], self._is_small, scores)

    def _projections(self, num_tokens: int) -> tuple[torch.Tensor, _Words | None]:
        """Memory of this thread for them, since fresh memory costs more than the product; as words where packed."""
        memory: tuple[torch.Tensor, _Words | None] | None = getattr(self._local, "projections", None)
        if memory is None or len(memory[0]) != num_tokens:
            projected = torch.empty((num_tokens, self._weight[0].shape[1]), dtype=self._dtype)
            memory = projected, _as_words(projected) if self._dtype == torch.bfloat16 else None
            self._local.projections = memory
        return memory


def _as_words(projected: torch.Tensor) -> _Words:
    """The same memory as u32: two bf16 or one f32 each."""
    return projected.view(torch.int32).numpy().view(np.uint32)


def _floats(parameter: torch.Tensor) -> _Floats:
    """A copy: f32, contiguous."""
    return np.array(parameter.detach().numpy(), dtype=np.float32, order="C")


def _as_numpy(values: torch.Tensor | _Floats) -> _Floats:
    return values.float().numpy() if isinstance(values, torch.Tensor) else values


def _compile() -> None:
    """Compile _score for the one set of types it is called with, or load it from numba's cache."""
    with _compiling:
        if _score.signatures:
            return
        try:
            _score.enable_caching()
        except RuntimeError as error:
            _logger.info("the gates' scoring loop is compiled anew in every process: %s", error)
        vector, matrix, cube = float32[::1], float32[:, ::1], float32[:, :, ::1]
        parameters = (cube, vector, matrix, cube, matrix, matrix)
        _score.compile((uint32[:, ::1], types.boolean, int64, *parameters, types.boolean, float32[:, :]))
        # From here on arrays are fitted to these types, and other ones are an error rather than another compilation.
        _score.disable_compile()


@_compiled
def _power_of_two(x: np.float32) -> np.float32:
    """2^x in f32 with a relative error of 2e-7, for -126 <= x <= 127. NaN gives NaN."""
    rounded = x + _ROUND
    r = x - (rounded - _ROUND)
    power = np.uint32(np.float32(rounded).view(np.uint32) << _EXPONENT_SHIFT).view(np.float32)
    return power * ((((((_P6 * r + _P5) * r + _P4) * r + _P3) * r + _P2) * r + _P1) * r + _ONE)


@_compiled
def _bounded(x: np.float32) -> np.float32:
    """x, moved to where _power_of_two holds. NaN stays, since no comparison with it is true."""
    x = _LEAST_POWER if x < _LEAST_POWER else x
    return _LARGEST_POWER if x > _LARGEST_POWER else x


@_compiled
def _load(projected: _Words, is_packed: bool, first: int, count: int, member: int, dim: int, vectors: _Floats) -> None:
    """Channels of one member of one head for tokens first .. first + count: vectors f32[channel, token]."""
    dim += dim % 2
    if is_packed:
        column = member * (dim // 2)
        for pair in range(dim // 2):
            for t in range(count):
                word = projected[first + t, column + pair]
                vectors[2 * pair, t] = np.uint32(word << _HALF_WORD).view(np.float32)
                vectors[2 * pair + 1, t] = np.uint32(word & _UPPER_HALF).view(np.float32)
    else:
        for channel in range(dim):
            for t in range(count):
                vectors[channel, t] = np.uint32(projected[first + t, member * dim + channel]).view(np.float32)


@_compiled
def _multiply(vectors: _Floats, sink: _Floats, products: _Floats) -> None:
    """products[t] = sum over c of sink[c] vectors[c, t], for a multiple of _UNROLL channels."""
    for t in range(_LANES):
        products[t] = _ZERO
    for c in range(0, len(sink), _UNROLL):
        s0, s1, s2, s3 = sink[c], sink[c + 1], sink[c + 2], sink[c + 3]
        s4, s5, s6, s7 = sink[c + 4], sink[c + 5], sink[c + 6], sink[c + 7]
        for t in range(_LANES):
            half = products[t] + s0 * vectors[c, t] + s1 * vectors[c + 1, t] + s2 * vectors[c + 2, t]
            half = half + s3 * vectors[c + 3, t] + s4 * vectors[c + 4, t] + s5 * vectors[c + 5, t]
            products[t] = half + s6 * vectors[c + 6, t] + s7 * vectors[c + 7, t]


@_compiled
def _score(
    projected: _Words,
    is_packed: bool,
    dim: int,
    q_bias: _Floats,
    own_weight: _Floats,
    own_bias: _Floats,
    sinks: _Floats,
    first_term: _Floats,
    log_first_term: _Floats,
    is_small: bool,
    scores: _Floats,
) -> None:
    """Scores of one layer from its projections, _LANES tokens and one KV head at a time.

    score[t, h] = mean over g of E / (E + S), S = first_term[h, g] + sum over r of 2^(sinks[h, r] . q^),
    E = 2^(sum over c of own_weight[c] q^[c] k^[c] + own_bias[h, g]), where q^ is q + q_bias divided by the root of
    (sum of squares + dim RMS_EPSILON), and k^ likewise without a bias.

    projected: words[num_tokens, ...], of two bf16 (is_packed) or one f32 each, in the order (kv head, member, channel)
    with the group's queries before its key and an even number of channels. q_bias: f32[num_kv_heads, group_size, dim];
    own_weight: f32[dim]; own_bias, first_term and its logarithm to base 2: f32[num_kv_heads, group_size]; sinks:
    f32[num_kv_heads, num_sinks, channels], with zeros up to a multiple of _UNROLL. is_small: no power in S can leave
    the range of fp32. scores: f32[num_tokens, num_kv_heads] of any strides, written.
    """
    num_tokens = projected.shape[0]
    num_heads, group, _ = q_bias.shape
    num_sinks, channels = sinks.shape[1:]
    epsilon = np.float32(dim * RMS_EPSILON)
    # Lanes past the last token keep what they held: lanes do not mix, and these are not stored.
    key = np.zeros((channels, _LANES), np.float32)
    query = np.zeros((channels, _LANES), np.float32)
    products = np.empty((1 if is_small else max(1, num_sinks), _LANES), np.float32)
    norm = np.empty(_LANES, np.float32)
    own = np.empty(_LANES, np.float32)
    largest = np.empty(_LANES, np.float32)
    total = np.empty(_LANES, np.float32)
    mean = np.empty(_LANES, np.float32)
    for first in range(0, num_tokens, _LANES):
        count = min(_LANES, num_tokens - first)
        for h in range(num_heads):
            _load(projected, is_packed, first, count, h * (group + 1) + group, dim, key)
            for t in range(_LANES):
                norm[t] = epsilon
                mean[t] = _ZERO
            for c in range(dim):
                for t in range(_LANES):
                    norm[t] += key[c, t] * key[c, t]
            for t in range(_LANES):
                norm[t] = _ONE / np.sqrt(norm[t])
            for c in range(dim):
                weight = own_weight[c]
                for t in range(_LANES):
                    key[c, t] = key[c, t] * norm[t] * weight

            for g in range(group):
                _load(projected, is_packed, first, count, h * (group + 1) + g, dim, query)
                for t in range(_LANES):
                    norm[t] = epsilon
                for c in range(dim):
                    bias = q_bias[h, g, c]
                    for t in range(_LANES):
                        value = query[c, t] + bias
                        query[c, t] = value
                        norm[t] += value * value
                bias = own_bias[h, g]
                for t in range(_LANES):
                    norm[t] = _ONE / np.sqrt(norm[t])
                    own[t] = bias
                for c in range(dim):
                    for t in range(_LANES):
                        value = query[c, t] * norm[t]
                        query[c, t] = value
                        own[t] += value * key[c, t]

                if is_small:
                    for t in range(_LANES):
                        largest[t] = _ZERO
                        total[t] = first_term[h, g]
                    for r in range(num_sinks):
                        _multiply(query, sinks[h, r], products[0])
                        for t in range(_LANES):
                            total[t] += _power_of_two(products[0, t])
                else:
                    for t in range(_LANES):
                        largest[t] = log_first_term[h, g]
                    for r in range(num_sinks):
                        _multiply(query, sinks[h, r], products[r])
                        for t in range(_LANES):
                            largest[t] = products[r, t] if products[r, t] > largest[t] else largest[t]
                    for t in range(_LANES):
                        total[t] = _power_of_two(_bounded(log_first_term[h, g] - largest[t]))
                    for r in range(num_sinks):
                        for t in range(_LANES):
                            total[t] += _power_of_two(_bounded(products[r, t] - largest[t]))
                # S / E may become infinite, which makes the score zero.
                for t in range(_LANES):
                    mean[t] += _ONE / (_ONE + total[t] * _power_of_two(_bounded(largest[t] - own[t])))
            # A division: scores of 1 have 1 for their mean.
            for t in range(count):
                scores[first + t, h] = mean[t] / np.float32(group)
