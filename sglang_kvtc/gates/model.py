"""The gates: from what enters a layer's attention to one score per KV head, never from positions.

Fast KVzip (arXiv 2601.17668), section "Sink-Attention Gate Architecture", and the gates it compares with (figure 9).
Parameters are stacked over layers, so that one batched product serves all layers and one layer is a slice.
"""

from __future__ import annotations

import enum
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import nn

from sglang_kvtc.errors import ConfigError

RMS_EPSILON = 1e-6
"""Of the RMS norms, as in the released gates (transformers' Qwen3RMSNorm)."""
MAX_LAYERS = 1024
MAX_INPUT_FEATURES = 1 << 17
MAX_HEADS = 1024
MAX_GROUP_SIZE = 1024
MAX_GATE_DIM = 1024
MAX_SINKS = 1024
_LARGEST_PRODUCT = 1e18
"""Of the MLP's hidden units: sums of them stay finite in fp32."""


class GateKind(enum.StrEnum):
    """The function from input to score."""

    SINK_ATTENTION = "sink-attention"
    LINEAR = "linear"
    MLP = "mlp"


class GateInput(enum.StrEnum):
    """What a gate is fed: the hidden state that enters attention, or the layer's keys, [num_kv_heads x head_dim]."""

    HIDDEN = "hidden"
    KEYS = "keys"
    KEYS_BEFORE_ROPE = "keys-before-rope"


class BiasForm(enum.StrEnum):
    """How sink attention uses its bias; q.k/sqrt(d) in one form, q.k in the other. See SinkAttentionGates."""

    RELEASED = "released"
    PAPER = "paper"


@dataclass(frozen=True, slots=True)
class GateShape:
    """What a model asks of its gates: layers, width of the gate's input, KV heads, and query heads per KV head."""

    num_layers: int
    input_features: int
    num_kv_heads: int
    group_size: int


@dataclass(frozen=True, slots=True)
class GateConfig:
    """Everything about gates but their weights.

    group_size: query heads per KV head. gate_dim: width of the gate's own queries and keys; num_sinks: learned keys
    per head, 0 for a denominator that is not learned. The kinds linear and mlp have neither sinks nor bias form; the
    mlp's width follows from the parameters that sink attention of this configuration would have.
    Raises ConfigError, naming the field, for values outside their bounds.
    """

    kind: GateKind
    input: GateInput
    num_layers: int
    input_features: int
    num_kv_heads: int
    group_size: int
    gate_dim: int = 16
    num_sinks: int = 16
    bias_form: BiasForm = BiasForm.RELEASED

    def __post_init__(self) -> None:
        for name, least, most in (
            ("num_layers", 1, MAX_LAYERS),
            ("input_features", 1, MAX_INPUT_FEATURES),
            ("num_kv_heads", 1, MAX_HEADS),
            ("group_size", 1, MAX_GROUP_SIZE),
            ("gate_dim", 1, MAX_GATE_DIM),
            ("num_sinks", 0, MAX_SINKS),
        ):
            value = getattr(self, name)
            if not least <= value <= most:
                raise ConfigError(f"gates: {name} is {value}, expected {least} to {most}")

    @property
    def shape(self) -> GateShape:
        return GateShape(self.num_layers, self.input_features, self.num_kv_heads, self.group_size)


class Gates(nn.Module, ABC):
    """The gates of all layers. Other kinds fit in by giving their parameters' shapes and `forward`.

    Parameters are f32, the first axis of each is the layer; `double()` makes an oracle of it.
    """

    def __init__(self, config: GateConfig) -> None:
        super().__init__()
        self.config = config
        for name, shape in self.parameter_shapes(config).items():
            self.register_parameter(name, nn.Parameter(torch.zeros(config.num_layers, *shape)))

    @classmethod
    @abstractmethod
    def parameter_shapes(cls, config: GateConfig) -> dict[str, tuple[int, ...]]:
        """Names of the parameters and their shapes in one layer."""

    @abstractmethod
    def forward(self, inputs: torch.Tensor, layers: slice = slice(None)) -> torch.Tensor:
        """Score tokens; differentiable, with scores that saturate rather than leave [0, 1].

        inputs: any float[number of layers in `layers`, num_tokens, input_features], converted to the parameters' dtype.
        Returns f32[the same, num_tokens, num_kv_heads] (the parameters' dtype): higher = keep.
        """

    @abstractmethod
    def initialize(self, generator: torch.Generator) -> None:
        """Draw the parameters with which training begins."""


class SinkAttentionGates(Gates):
    """Sink attention: the token's own key against learned sink keys, mean over the queries of a group.

    q_gh = norm(W_q h + b_q), k_h = norm(W_k h), both RMS-normalised over gate_dim = d with a weight per layer. With
    S_gh = sum_r exp(q_gh . sink_hr / c) the score of head h is the mean over g of

    - released: E / (E + S_gh), E = exp(q_gh . k_h / c + bias_hg), c = sqrt(d) (S = 1 without sinks), as the published
      weights are to be read;
    - paper: E / (E + S_gh + b_hg), E = exp(q_gh . k_h), c = 1, as printed. A negative b_hg would let scores pass 1 or
      divide by zero, hence b_hg = exp(bias_hg): positive for every parameter, and at its initial value of 1 one more
      sink of zeros. Without sinks and at bias 0 this is the printed ablation with its denominator fixed to E + 1.

    Rows of q_weight are ordered (kv head, group, channel), those of k_weight (kv head, channel).
    """

    q_weight: nn.Parameter
    q_bias: nn.Parameter
    k_weight: nn.Parameter
    q_norm: nn.Parameter
    k_norm: nn.Parameter
    sinks: nn.Parameter
    bias: nn.Parameter

    @classmethod
    def parameter_shapes(cls, config: GateConfig) -> dict[str, tuple[int, ...]]:
        heads, group, dim = config.num_kv_heads, config.group_size, config.gate_dim
        return {
            "q_weight": (heads * group * dim, config.input_features),
            "q_bias": (heads * group * dim,),
            "k_weight": (heads * dim, config.input_features),
            "q_norm": (dim,),
            "k_norm": (dim,),
            "sinks": (heads, config.num_sinks, dim),
            "bias": (heads, group),
        }

    def initialize(self, generator: torch.Generator) -> None:
        """Projections like torch's Linear, norm weights one, sinks and bias zero: scores begin near 1 / (1 + S)."""
        bound = self.config.input_features**-0.5
        with torch.no_grad():
            for parameter in (self.q_weight, self.q_bias, self.k_weight):
                parameter.uniform_(-bound, bound, generator=generator)
            self.q_norm.fill_(1)
            self.k_norm.fill_(1)
            self.sinks.zero_()
            self.bias.zero_()

    def forward(self, inputs: torch.Tensor, layers: slice = slice(None)) -> torch.Tensor:
        """Scores by the formula above, as sigmoid(log E - log of the other terms): no exponential can overflow."""
        config = self.config
        inputs = inputs.to(self.q_weight.dtype)
        num_layers, num_tokens, _ = inputs.shape
        q = torch.baddbmm(self.q_bias[layers, None], inputs, self.q_weight[layers].transpose(1, 2))
        q = q.view(num_layers, num_tokens, config.num_kv_heads, config.group_size, config.gate_dim)
        k = torch.bmm(inputs, self.k_weight[layers].transpose(1, 2))
        k = k.view(num_layers, num_tokens, config.num_kv_heads, 1, config.gate_dim)
        q = _rms_norm(q, self.q_norm[layers])
        k = _rms_norm(k, self.k_norm[layers])
        released = config.bias_form is BiasForm.RELEASED
        scale = config.gate_dim**-0.5 if released else 1.0

        own = (q * k).sum(dim=-1) * scale
        bias = self.bias[layers, None]
        # Head before token: one product per layer and head for all of its queries.
        flat = q.transpose(1, 2).flatten(2, 3)
        others = torch.matmul(flat, self.sinks[layers].transpose(2, 3)) * scale
        others = others.view(num_layers, config.num_kv_heads, num_tokens, config.group_size, -1).transpose(1, 2)
        if released:
            own = own + bias
        else:
            others = torch.cat([others, bias[..., None].expand(*own.shape, 1)], dim=-1)
        if others.shape[-1]:
            own = own - others.logsumexp(dim=-1)
        return own.sigmoid().mean(dim=-1)


class LinearGates(Gates):
    """score = sigmoid(w h + b) per head: the plainest gate."""

    weight: nn.Parameter
    bias: nn.Parameter

    @classmethod
    def parameter_shapes(cls, config: GateConfig) -> dict[str, tuple[int, ...]]:
        return {"weight": (config.num_kv_heads, config.input_features), "bias": (config.num_kv_heads,)}

    def initialize(self, generator: torch.Generator) -> None:
        """Like torch's Linear."""
        bound = self.config.input_features**-0.5
        with torch.no_grad():
            for parameter in (self.weight, self.bias):
                parameter.uniform_(-bound, bound, generator=generator)

    def forward(self, inputs: torch.Tensor, layers: slice = slice(None)) -> torch.Tensor:
        inputs = inputs.to(self.weight.dtype)
        return torch.baddbmm(self.bias[layers, None], inputs, self.weight[layers].transpose(1, 2)).sigmoid()


class MLPGates(Gates):
    """score = sigmoid(W_down (silu(W_gate h) * (W_up h)) + b): SwiGLU with as many parameters as sink attention."""

    gate_weight: nn.Parameter
    up_weight: nn.Parameter
    down_weight: nn.Parameter
    bias: nn.Parameter

    @classmethod
    def parameter_shapes(cls, config: GateConfig) -> dict[str, tuple[int, ...]]:
        width = mlp_width(config)
        return {
            "gate_weight": (width, config.input_features),
            "up_weight": (width, config.input_features),
            "down_weight": (config.num_kv_heads, width),
            "bias": (config.num_kv_heads,),
        }

    def initialize(self, generator: torch.Generator) -> None:
        """Like torch's Linear."""
        with torch.no_grad():
            for parameter in (self.gate_weight, self.up_weight, self.down_weight):
                bound = parameter.shape[-1] ** -0.5
                parameter.uniform_(-bound, bound, generator=generator)
            bound = self.down_weight.shape[-1] ** -0.5
            self.bias.uniform_(-bound, bound, generator=generator)

    def forward(self, inputs: torch.Tensor, layers: slice = slice(None)) -> torch.Tensor:
        inputs = inputs.to(self.gate_weight.dtype)
        gate = torch.bmm(inputs, self.gate_weight[layers].transpose(1, 2))
        hidden = nn.functional.silu(gate) * torch.bmm(inputs, self.up_weight[layers].transpose(1, 2))
        # Squares of large inputs may overflow, and two infinities of opposite sign would sum to NaN.
        largest = min(_LARGEST_PRODUCT, torch.finfo(hidden.dtype).max)
        hidden = hidden.clamp(-largest, largest)
        return torch.baddbmm(self.bias[layers, None], hidden, self.down_weight[layers].transpose(1, 2)).sigmoid()


GATES: dict[GateKind, type[Gates]] = {
    GateKind.SINK_ATTENTION: SinkAttentionGates,
    GateKind.LINEAR: LinearGates,
    GateKind.MLP: MLPGates,
}


def new_gates(config: GateConfig, seed: int) -> Gates:
    """Gates ready for training, on the CPU. The same seed gives the same parameters."""
    gates = GATES[config.kind](config)
    gates.initialize(torch.Generator().manual_seed(seed))
    return gates


def parameters_per_layer(kind: GateKind, config: GateConfig) -> int:
    """Parameters in one layer of gates of `kind`, whatever kind `config` itself names."""
    return sum(math.prod(shape) for shape in GATES[kind].parameter_shapes(config).values())


def mlp_width(config: GateConfig) -> int:
    """Hidden units with which the MLP comes nearest to sink attention's number of parameters; at least one."""
    heads = config.num_kv_heads
    wanted = parameters_per_layer(GateKind.SINK_ATTENTION, config)
    return max(1, round((wanted - heads) / (2 * config.input_features + heads)))


def _rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x: [num_layers, num_tokens, heads, group, gate_dim]; weight: [num_layers, gate_dim]."""
    mean_square = x.square().mean(dim=-1, keepdim=True)
    return x * torch.rsqrt(mean_square + RMS_EPSILON) * weight[:, None, None, None]
