"""Frozen configuration, read once at the edge from flags or one TOML file and passed down explicitly.

Every key has a default, so an empty file is a valid configuration. Unknown keys and wrong types are refused with the
key's name. The TOML layout is one table per struct: `[codec]`, `[tier]` and `[eviction]`.
"""

from __future__ import annotations

import importlib.util
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from sglang_kvtc.errors import ConfigError

PositiveInt = Annotated[int, msgspec.Meta(ge=1)]
NonNegativeInt = Annotated[int, msgspec.Meta(ge=0)]

CONFIG_ENV = "SGLANG_KVTC_CONFIG"
"""The one environment variable: path of the TOML file. It serves `sglang.Engine`, which takes no extra flags."""


class CodecConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How nodes are cut into frames and coded.

    target_ratio: which of the artifact's plans to use; 0 means the artifact's first one. Ratio 1 is lossless.
    sink_tokens: first positions of a sequence, always stored raw (KVTC section 2: coding them ruins the output).
    window_tokens: last tokens of a node, stored in `window_format` instead of by the plan of the others: "coded" takes
        the artifact's finest plan, "fp8" one byte per number, "raw" keeps them as they are.
    chunk_tokens: most tokens in one frame; bounds the working memory of encode and decode.
    coder: entropy coder of every section (bitstream.entropy); `coder_level` is its effort. "zstd" needs the package
        zstandard; its frames are a few per cent larger than those of "deflate" and coded many times as fast.
    compute_dtype: dtype of the projections; "auto" takes bfloat16 where the KV cache is 16-bit and the CPU multiplies
        bfloat16 in hardware, else float32.
    """

    target_ratio: float = 0.0
    sink_tokens: NonNegativeInt = 4
    window_tokens: NonNegativeInt = 128
    window_format: Literal["coded", "fp8", "raw"] = "coded"
    chunk_tokens: Annotated[int, msgspec.Meta(ge=16, le=8192)] = 512
    coder: Literal["identity", "deflate", "zstd"] = "deflate"
    coder_level: Annotated[int, msgspec.Meta(ge=1, le=9)] = 6
    compute_dtype: Literal["auto", "float32", "bfloat16"] = "auto"

    def __post_init__(self) -> None:
        if self.coder == "zstd" and importlib.util.find_spec("zstandard") is None:
            raise ConfigError("coder 'zstd' needs the package zstandard: install sglang-kvtc[zstd], or use 'deflate'")


class TierConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When and where prefix nodes are compressed.

    arena_bytes: budget of this rank for frames and for raw copies on their way to becoming frames; 0 means a tenth of
        the memory available at start.
    staging_bytes: most of it that raw copies may take while they wait for the encoder.
    min_node_tokens: a node with fewer tokens to code has none coded; they are stored in the window format.
    stale_after_s: an unused prefix untouched for so long is compressed before there is pressure; 0 turns it off.
    stale_min_usage: ... once this share of the device pool is in use (below it, a device hit is free and better).
    compress_per_tick: most nodes handed to the encoder in one scheduler step.
    restore_min_tokens: shorter host hits are recomputed, since a restore has a fixed cost.
    layers_per_step: layers decoded between two releases of waiting attention layers.
    codec_threads: CPU threads of the encoder and decoder; 0 means as many as torch uses.
    """

    arena_bytes: NonNegativeInt = 0
    staging_bytes: PositiveInt = 256 << 20
    min_node_tokens: PositiveInt = 32
    stale_after_s: Annotated[float, msgspec.Meta(ge=0)] = 30.0
    stale_min_usage: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.5
    compress_per_tick: PositiveInt = 4
    restore_min_tokens: PositiveInt = 16
    layers_per_step: PositiveInt = 6
    codec_threads: NonNegativeInt = 0


class EvictionConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Gated eviction inside live requests. It is on when `gates` names a file.

    gates: written by `sglang-kvtc train-gates` or `import-gates` for the served checkpoint.
    budget: how many KV pairs stay: the fields of `eviction.budget.Budget`, `[eviction.budget]` in TOML.
    decode_interval: tokens a request generates between two evictions, which is also how many hidden states are kept
        per running request.
    slots_per_token: token slots per token of memory, since evicted requests have more tokens than fit whole; 0 follows
        from the budget. Each costs a table entry and a score per KV pair.
    """

    gates: str = ""
    budget: dict[str, Any] = msgspec.field(default_factory=lambda: {"keep_fraction": 0.5})
    decode_interval: PositiveInt = 128
    slots_per_token: NonNegativeInt = 0


class KVTCConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything the server needs. `artifact` is the directory or file written by `sglang-kvtc calibrate`."""

    artifact: str = ""
    codec: CodecConfig = CodecConfig()
    tier: TierConfig = TierConfig()
    eviction: EvictionConfig = EvictionConfig()


def from_toml(path: str | Path) -> KVTCConfig:
    """Read a configuration file.

    Raises ConfigError when the file cannot be read, is not TOML, or has an unknown key or a value of the wrong type.
    """
    try:
        table = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"cannot read the configuration {path}: {error}") from error
    return from_table(table, str(path))


def from_table(table: dict[str, object], source: str) -> KVTCConfig:
    """Validate a parsed table; `source` names it in errors. Raises ConfigError."""
    try:
        return msgspec.convert(table, KVTCConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{source}: {error}") from error
