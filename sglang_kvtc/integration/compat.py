"""What is supported, checked once at start. Everything else is refused by name with a sentence that says what to do."""

from __future__ import annotations

import dataclasses
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from sglang_kvtc.artifact.fingerprint import fingerprint_model
from sglang_kvtc.artifact.io import load_artifact
from sglang_kvtc.artifact.schema import Artifact, RopeSpec
from sglang_kvtc.artifact.shard import shard_of
from sglang_kvtc.config import KVTCConfig
from sglang_kvtc.errors import ArtifactError, ConfigError, UnsupportedError
from sglang_kvtc.integration.eviction_options import budget_of, load_gates_for
from sglang_kvtc.integration.flags import BACKEND
from sglang_kvtc.types import ModelGeometry

SUPPORTED_SGLANG = ("0.5.23",)
"""Releases whose private names this integration was verified against."""

CACHE_INTERNALS = (
    "_demote",
    "_evict_device_leaf",
    "_evict_device_next_node",
    "_execute_and_commit_kv_backup",
    "check_hicache_events",
    "evict_host",
    "init_load_back",
    "insert",
    "match_prefix",
    "path_device_indices",
    "writing_check",
)
"""Methods of UnifiedRadixCache that the tier overrides or calls."""

_DTYPES = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}

_Refusals = tuple[tuple[str, tuple[Any, ...], str], ...]
"""(ServerArgs field, accepted values, why and what to do)."""

_REFUSED_SETTINGS: _Refusals = (
    ("speculative_algorithm", (None,), "draft KV would be left out: drop --speculative-algorithm"),
    ("disaggregation_mode", ("null", None), "PD disaggregation is not supported: drop --disaggregation-mode"),
    ("tp_size", (1,), "tensor parallelism needs a file per shard, which this version lacks: use --tp-size 1"),
    ("pp_size", (1,), "pipeline parallelism needs a file per stage, which this version lacks: use --pp-size 1"),
    ("dp_size", (1,), "data parallelism is not tested: use --dp-size 1"),
    ("enable_lmcache", (False,), "another cache tier is on: drop --enable-lmcache"),
    ("enable_flexkv", (False,), "another cache tier is on: drop --enable-flexkv"),
    ("enable_unified_cache_external_linker", (False,), "another cache tier is on: drop the external linker"),
    ("hicache_storage_backend", (None,), "storage below the tier is not supported: drop --hicache-storage-backend"),
    ("enable_session_radix_cache", (False,), "session caching is not tested: drop --enable-session-radix-cache"),
    ("enable_lora", (None, False), "LoRA adapters change K and V that were fitted without them: drop --enable-lora"),
)
"""Of the tier and of gated eviction alike."""

_REFUSED_BY_TIER: _Refusals = (
    ("disable_radix_cache", (False,), "there is no prefix cache to compress: drop --disable-radix-cache"),
)

_TORCH_NATIVE = "cells are read by our backend of that name only: use --attention-backend torch_native"
_REFUSED_BY_GATING: _Refusals = (
    ("device", ("cpu",), "this version evicts on CPU servers only: use --device cpu"),
    ("attention_backend", ("torch_native",), _TORCH_NATIVE),
    ("prefill_attention_backend", (None, "torch_native"), _TORCH_NATIVE),
    ("decode_attention_backend", (None, "torch_native"), _TORCH_NATIVE),
    ("page_size", (None, 1), "heads keep different tokens, so pages hold one: use --page-size 1"),
    ("enable_streaming_session", (False,), "sessions keep whole rows: drop --enable-streaming-session"),
    ("enable_hisparse", (False,), "another sparse cache is on: drop --enable-hisparse"),
    ("dllm_algorithm", (None,), "diffusion models rewrite their KV: drop --dllm-algorithm"),
    ("prefill_only_disable_kv_cache", (False,), "there is no KV cache: drop --prefill-only-disable-kv-cache"),
    ("enable_page_major_kv_layout", (False,), "cells have a layout of their own: drop --enable-page-major-kv-layout"),
    ("enable_pdmux", (False,), "prefill and decode would share cells unordered: drop --enable-pdmux"),
    ("dcp_size", (1,), "context parallelism is not supported: use --dcp-size 1"),
)


def check_engine_version() -> None:
    """Raises UnsupportedError for an SGLang release this integration was not verified against."""
    found = version("sglang")
    if found not in SUPPORTED_SGLANG:
        raise UnsupportedError(
            f"SGLang {found} is not supported: install sglang=={SUPPORTED_SGLANG[-1]} (supported: "
            f"{', '.join(SUPPORTED_SGLANG)})"
        )


def check_internals(cache_class: type) -> None:
    """Raises UnsupportedError if the engine lacks a method the tier stands on."""
    missing = [name for name in CACHE_INTERNALS if not callable(getattr(cache_class, name, None))]
    if missing:
        raise UnsupportedError(f"this SGLang lacks {', '.join(missing)} of {cache_class.__name__}: reinstall 0.5.23")


def check_settings(server_args: Any, config: KVTCConfig) -> None:
    """Raises UnsupportedError naming the first server setting that what is switched on cannot serve."""
    tier_is_on = server_args.radix_cache_backend == BACKEND
    refusals = _REFUSED_SETTINGS
    if tier_is_on:
        refusals += _REFUSED_BY_TIER
    if config.eviction.gates:
        refusals += _REFUSED_BY_GATING
        if server_args.enable_hierarchical_cache and not tier_is_on:
            raise UnsupportedError(
                "enable_hierarchical_cache=True: it copies KV by slot, which holds cells: use --enable-kvtc instead"
            )
    for name, accepted, advice in refusals:
        value = getattr(server_args, name)
        if value not in accepted:
            raise UnsupportedError(f"{name}={value!r}: {advice}")
    dtype = server_args.kv_cache_dtype
    if dtype not in ("auto", "bf16", "bfloat16"):
        raise UnsupportedError(f"kv_cache_dtype={dtype!r}: quantised KV keeps scales apart; use --kv-cache-dtype auto")


def load_for_model(config: KVTCConfig, model_path: str) -> Artifact:
    """The artifact of the configuration, checked against the checkpoint.

    Raises ArtifactError if it is missing, damaged, was fitted on another checkpoint or is for one rank of several.
    """
    if not config.artifact:
        raise ConfigError(
            "no artifact given: pass --kvtc-artifact, made by "
            f"`sglang-kvtc calibrate --model {model_path} --out artifact/`"
        )
    artifact = load_artifact(config.artifact)
    found = fingerprint_model(checked_model_dir(model_path))
    if found.digest != artifact.fingerprint.digest:
        raise ArtifactError(
            f"{config.artifact} was made for {artifact.fingerprint.name} ({artifact.fingerprint.digest[:12]}), but "
            f"{model_path} is {found.name} ({found.digest[:12]}): run `sglang-kvtc calibrate --model {model_path}`"
        )
    shard = shard_of(artifact.provenance)
    if shard is not None:
        raise ArtifactError(
            f"{config.artifact} is for rank {shard.name} of a model that is spread over "
            f"{shard.tp_size * shard.pp_size} ranks, and this server has one: calibrate without --tp and --pp"
        )
    return artifact


def check_launch(server_args: Any, config: KVTCConfig) -> None:
    """Everything that can be known before weights load. Raises a KVTCError."""
    check_engine_version()
    check_settings(server_args, config)
    if server_args.radix_cache_backend == BACKEND:
        load_for_model(config, server_args.model_path)
    if config.eviction.gates:
        budget_of(config.eviction)
        load_gates_for(config.eviction, checked_model_dir(server_args.model_path))


def checked_model_dir(model_path: str) -> Path:
    """Raises UnsupportedError unless the checkpoint lies in a local directory."""
    model_dir = Path(model_path)
    if not model_dir.is_dir():
        raise UnsupportedError(f"--model-path {model_path} is not a local directory: download the checkpoint first")
    return model_dir


def check_pool(kvcache: Any, model_config: Any, is_hybrid: bool, artifact: Artifact) -> ModelGeometry:
    """Compare the engine's KV pool with the artifact and return the pool's geometry.

    The dtype is the pool's: bases and plans hold for any, and frames of different dtypes never mix, since a frame
    names its geometry. Raises UnsupportedError for a pool that is not plain multi-head NHD in 16 or 32 bits on the
    CPU, ArtifactError for another geometry.
    """
    from sglang.srt.configs.model_config import AttentionArch
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    from sglang_kvtc.integration.cell_pool import CellKVPool

    if model_config.attention_arch is not AttentionArch.MHA or type(kvcache) not in (MHATokenToKVPool, CellKVPool):
        raise UnsupportedError(
            f"{type(kvcache).__name__} with {model_config.attention_arch.name} attention: only models with plain "
            "multi-head or grouped-query attention have a KV cache that can be coded"
        )
    if is_hybrid or model_config.is_hybrid_swa:
        raise UnsupportedError("sliding-window and Mamba hybrids keep state beside the KV cache, which is not coded")
    if torch.device(kvcache.device).type != "cpu":
        raise UnsupportedError(f"device {kvcache.device}: this version restores on CPU servers only; use --device cpu")
    keys, values = kvcache.k_buffer[0], kvcache.v_buffer[0]
    if keys.dtype not in _DTYPES or keys.dtype != values.dtype:
        raise UnsupportedError(f"KV dtypes {keys.dtype} and {values.dtype}: use a 16-bit or 32-bit KV cache")
    found = ModelGeometry(
        num_layers=kvcache.layer_num,
        num_kv_heads=kvcache.head_num,
        head_dim=kvcache.head_dim,
        v_head_dim=kvcache.v_head_dim,
        dtype=_DTYPES[keys.dtype],
    )
    of_heads = () if isinstance(kvcache, CellKVPool) else (found.num_kv_heads,)
    expected_shapes = [(*of_heads, found.head_dim), (*of_heads, found.v_head_dim)]
    if [tuple(keys.shape[1:]), tuple(values.shape[1:])] != expected_shapes:
        raise UnsupportedError(
            f"the KV pool is laid out as {tuple(keys.shape)} and {tuple(values.shape)}, not [slot, head, channel] or "
            "[cell, channel]"
        )
    if found != dataclasses.replace(artifact.geometry, dtype=found.dtype):
        raise ArtifactError(f"the artifact describes {artifact.geometry}, the server runs {found}: calibrate again")
    return found


def check_rope(model: torch.nn.Module, artifact: Artifact, context_length: int) -> None:
    """Compare the rotary modules of the loaded model with the artifact's rope, at every admitted scale of positions.

    model: SGLang's. context_length: positions of a request are below it. Raises ArtifactError where the model rotates
    otherwise, UnsupportedError where it rotates by more than one rope, where the check cannot be made, or where
    the rope holds for fewer positions than a request may have.
    """
    from sglang.srt.layers.radix_attention import RadixAttention

    rope = artifact.rope
    if rope.position_limit is not None and context_length > rope.position_limit:
        raise UnsupportedError(
            f"rope type {rope.kind!r} with requests of up to {context_length} tokens: above {rope.position_limit} "
            "SGLang rotates by the longest request of each batch, so keys of one position differ between batches; "
            f"use --context-length {rope.position_limit}"
        )
    checked: set[torch.nn.Module] = set()
    for name, module in model.named_modules():
        children = dict(module.named_children())
        if not any(isinstance(child, RadixAttention) for child in children.values()):
            continue
        rotary = children.get("rotary_emb")
        if rotary is None:
            raise UnsupportedError(
                f"{name} of {type(model).__name__} has no rotary embedding of SGLang's beside its attention: how its "
                "keys are rotated cannot be checked"
            )
        if rotary not in checked:
            _check_rotary(name, rotary, rope, artifact.geometry.head_dim, context_length)
            checked.add(rotary)
    if not checked:
        raise UnsupportedError(f"{type(model).__name__} has no attention layers of SGLang's whose rope can be checked")


def _check_rotary(name: str, rotary: Any, rope: RopeSpec, head_dim: int, context_length: int) -> None:
    """`rotary`: an SGLang module; its table has a row of cosines and then sines for every position."""
    from sglang.srt.layers import rotary_embedding
    from sglang.srt.layers.rotary_embedding import base, rope_variant, yarn

    of_longrope = type(rotary) is rope_variant.Phi3LongRoPEScaledRotaryEmbedding
    if not of_longrope and type(rotary) not in (
        rotary_embedding.RotaryEmbedding,
        base.LinearScalingRotaryEmbedding,
        rope_variant.DynamicNTKAlphaRotaryEmbedding,
        rope_variant.DynamicNTKScalingRotaryEmbedding,
        rope_variant.Llama3RotaryEmbedding,
        yarn.YaRNScalingRotaryEmbedding,
    ):
        raise UnsupportedError(f"{name} rotates keys by {type(rotary).__name__}, which is not supported")
    # SGLang's longrope knows NeoX pairs only and says so nowhere.
    found = (rotary.head_size, rotary.rotary_dim, not (of_longrope or rotary.is_neox_style))
    expected = (head_dim, rope.rotary_dim, rope.interleaved)
    if found != expected:
        raise ArtifactError(
            f"head size, rotary channels and interleaved pairs of {name} are {found}, the artifact says {expected}: "
            "calibrate again"
        )
    table = rotary.short_cos_sin_cache if of_longrope else rotary.cos_sin_cache
    if len(table) < context_length:
        raise UnsupportedError(
            f"the rotary table of {name} has {len(table)} rows for requests of up to {context_length} tokens: "
            f"use --context-length {len(table)}"
        )
    positions = _sampled_positions(context_length)
    rows = table.index_select(0, positions.to(table.device)).cpu().double()
    angles = positions.double()[:, None] * torch.tensor(rope.inv_freq, dtype=torch.float64)
    expected_rows = torch.cat([angles.cos(), angles.sin()], dim=-1) * rope.attention_factor
    # SGLang computes in fp32: ten roundings up to an angle, four after it, and eight of the weight between a frequency
    # and its part by the scaling factor, which counts that many times. Then the row is rounded to the table's dtype.
    roundings = (10 + 8 * getattr(rotary, "scaling_factor", 1)) * angles.repeat(1, 2).abs() + 4
    tolerance = (roundings * torch.finfo(torch.float32).eps + torch.finfo(table.dtype).eps) / 2
    wrong = (rows - expected_rows).abs() > rope.attention_factor * tolerance
    if wrong.any():
        position = int(positions[wrong.any(dim=-1)][0])
        raise ArtifactError(
            f"{name} rotates position {position} otherwise than the artifact's rope ({rope.kind}): if the artifact is "
            "of this model, drop what changes its rope (--json-model-override-args) or use a smaller --context-length"
        )


def _sampled_positions(context_length: int) -> torch.Tensor:
    """i64[n]: the last position, and every power of two, so that each frequency is seen at an angle near 1."""
    powers = [1 << exponent for exponent in range((context_length - 1).bit_length())]
    return torch.tensor(sorted({*powers, context_length - 1}))
