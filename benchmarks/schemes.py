"""Schemes: named ways to store a whole cache, sinks and window included, which every accuracy table compares."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec
import torch

from sglang_kvtc.artifact.fingerprint import fingerprint_model
from sglang_kvtc.artifact.io import load_artifact
from sglang_kvtc.artifact.schema import Artifact
from sglang_kvtc.benchmarks.baselines import Coded, CodedCache, fp8, kivi, per_head_svd, truncated_pca
from sglang_kvtc.benchmarks.harness import SINK_TOKENS, WINDOW_TOKENS, Method
from sglang_kvtc.calibrate.calibration import cached_calibration
from sglang_kvtc.calibrate.demo_artifact import DEMO_TOKENS, demo_calibration
from sglang_kvtc.calibrate.demo_model import default_cache_dir, demo_model_dir
from sglang_kvtc.calibrate.progress import Progress
from sglang_kvtc.codec.codec import KVCodec
from sglang_kvtc.config import CodecConfig
from sglang_kvtc.errors import ArtifactError, ConfigError
from sglang_kvtc.types import TokenRange

CacheCoder = Callable[[torch.Tensor, torch.Tensor], CodedCache]
"""Codes and decodes a whole cache: K after RoPE and V, [num_layers, num_tokens, num_kv_heads, head size]."""

DEFAULT_METHODS = ("fp8", "kivi4", "kivi2", "svd4", "dpq8", "dpq16", "kvtc")
_METHOD = re.compile(
    r"fp8|kivi(?P<bits>[24])|(?P<kind>svd|dpq)(?P<target>[1-9]\d*(\.\d+)?)|kvtc(?P<plan>[1-9]\d*(\.\d+)?)?"
)


@dataclass(frozen=True, slots=True)
class Scheme:
    """A way to store a cache. target_ratio: what it was asked for, by its own count; None for the full cache."""

    name: str
    target_ratio: float | None
    code: CacheCoder


@dataclass(frozen=True, slots=True)
class Calibrated:
    """An artifact of the model and what its rows are called: a label for one of several, or nothing."""

    label: str
    artifact: Artifact

    def named(self, name: str) -> str:
        return f"{name}, {self.label}" if self.label else name


@dataclass(slots=True)
class Bytes:
    """Bytes over many caches: of the coded parts in 16 bit, of what is stored for them, and of whole caches."""

    coded: int = 0
    stored: int = 0
    whole: int = 0

    def add(self, cache: CodedCache) -> None:
        self.coded += cache.coded_bytes
        self.stored += cache.stored_bytes
        self.whole += cache.whole_bytes

    def merge(self, other: Bytes) -> None:
        self.coded += other.coded
        self.stored += other.stored
        self.whole += other.whole

    def columns(self) -> dict[str, object]:
        """`ratio` of the coded parts, as the paper counts it (without window), and `whole_ratio` of the caches."""
        return {
            "ratio": self.coded / self.stored if self.stored else 1.0,
            "whole_ratio": self.whole / (self.whole - self.coded + self.stored),
        }


def full_cache() -> Scheme:
    """The reference: nothing is coded."""
    return Scheme("full cache", None, lambda keys, values: CodedCache(keys, values, 0, 0))


def between(method: Method, sink_tokens: int, window_tokens: int) -> CacheCoder:
    """Code the tokens between the sinks and the window with `method`; both stay raw.

    As in the paper (appendix B.3) the sinks count as coded tokens that were stored in full, and the window not at all.
    """

    def code(keys: torch.Tensor, values: torch.Tensor) -> CodedCache:
        num_tokens = keys.shape[1]
        stop = max(0, num_tokens - window_tokens)
        start = min(sink_tokens, stop)
        token_bytes = 2 * (keys[:, 0].numel() + values[:, 0].numel())
        if start == stop:
            return CodedCache(keys, values, token_bytes * stop, token_bytes * stop)
        coded = method(keys[:, start:stop], values[:, start:stop], start)
        return CodedCache(
            torch.cat([keys[:, :start], coded.keys, keys[:, stop:]], dim=1),
            torch.cat([values[:, :start], coded.values, values[:, stop:]], dim=1),
            coded_bytes=token_bytes * stop,
            stored_bytes=token_bytes * start + coded.stored_bytes,
        )

    return code


def kvtc(artifact: Artifact, target_ratio: float, *, as_node: bool = False) -> Method:
    """The codec on tokens that are neither sinks nor window, or on a whole node, with both, as the tier stores it."""
    config = CodecConfig(target_ratio=target_ratio)
    if not as_node:
        config = msgspec.structs.replace(config, sink_tokens=0, window_tokens=0)
    return partial(coded_node, KVCodec(artifact, config))


def coded_node(
    codec: KVCodec, keys: torch.Tensor, values: torch.Tensor, start_position: int, *, min_coded_tokens: int = 1
) -> Coded:
    """A node after it was frames, with the bytes of all of them."""
    parts, stored_bytes = [], 0
    for tokens, encoded in codec.encode_node(keys, values, start_position, min_coded_tokens=min_coded_tokens):
        opened = codec.open(encoded.frame, tokens.start, len(tokens))
        parts.append(opened.reconstruct(range(len(keys)), TokenRange(0, len(tokens))))
        stored_bytes += len(encoded.frame)
    decoded_keys, decoded_values = (torch.cat(side, dim=1) for side in zip(*parts, strict=True))
    return Coded(decoded_keys, decoded_values, stored_bytes)


def schemes(
    names: Iterable[str],
    calibrated: Sequence[Calibrated],
    *,
    sink_tokens: int = SINK_TOKENS,
    window_tokens: int = WINDOW_TOKENS,
    residual_tokens: int | None = None,
) -> list[Scheme]:
    """The full cache, then what `names` say, with KVTC methods once per artifact.

    Names: `fp8`; `kivi2`, `kivi4`; `svdR` (per-head SVD) and `dpqR` (PCA without quantiser) at target ratio R; `kvtcR`
    for one plan or `kvtc` for all. fp8 codes everything; KIVI has no sinks and a window of its own kind,
    `residual_tokens` (as long as the others' by default); all others keep sinks and window raw. Raises ConfigError for
    another name and for a plan that an artifact has not.
    """
    rope = calibrated[0].artifact.rope
    found = [full_cache()]
    method: Method
    coder: CacheCoder
    for name in names:
        match = _METHOD.fullmatch(name)
        if match is None:
            raise ConfigError(f"--methods {name}: expected fp8, kivi2, kivi4, svd4, dpq8, kvtc, kvtc16 or the like")
        target = float(match["target"] or match["plan"] or 0)
        if name == "fp8":
            found.append(Scheme("fp8", 2.0, between(fp8, 0, 0)))
        elif match["bits"]:
            num_bits = int(match["bits"])
            residual = window_tokens if residual_tokens is None else residual_tokens
            coder = partial(kivi, num_bits=num_bits, residual_tokens=residual)
            found.append(Scheme(f"KIVI {num_bits} bit", 16 / num_bits, coder))
        elif match["kind"] == "svd":
            method = partial(per_head_svd, rope=rope, target_ratio=target)
            found.append(Scheme(f"per-head SVD {target:g}x", target, between(method, sink_tokens, window_tokens)))
        elif match["kind"] == "dpq":
            for one in calibrated:
                method = partial(truncated_pca, artifact=one.artifact, target_ratio=target)
                coder = between(method, sink_tokens, window_tokens)
                found.append(Scheme(one.named(f"kvtc {target:g}x -DPQ"), target, coder))
        else:
            for one in calibrated:
                for ratio in [target] if target else sorted(plan.target_ratio for plan in one.artifact.plans):
                    coder = between(kvtc(one.artifact, ratio), sink_tokens, window_tokens)
                    found.append(Scheme(one.named(f"kvtc {ratio:g}x"), ratio, coder))
    return found


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Which model, with which artifacts."""
    parser.add_argument("--model", type=Path, help="Hugging Face model directory (default: the demo model)")
    parser.add_argument(
        "--artifact",
        action="append",
        default=[],
        metavar="[LABEL=]DIR",
        help="artifact of this model; several are compared under their labels (default: calibrated on first use)",
    )
    parser.add_argument("--tokens", type=int, default=DEMO_TOKENS, help="... with so many tokens (default %(default)s)")
    parser.add_argument("--cache-dir", type=Path, default=default_cache_dir(), help="demo model and artifacts")


def find_model(args: argparse.Namespace) -> Path:
    """The model directory that `add_model_arguments` names."""
    model_dir: Path = args.model or demo_model_dir(args.cache_dir)
    return model_dir


def find_artifacts(args: argparse.Namespace, model_dir: Path, progress: Progress) -> list[Calibrated]:
    """The artifacts that `add_model_arguments` name. Raises ArtifactError for one of another model."""
    if not args.artifact:
        path = cached_calibration(demo_calibration(model_dir, args.tokens), args.cache_dir, progress)
        return [Calibrated("", load_artifact(path))]
    labels = [text.rpartition("=")[0] for text in args.artifact]
    if len(set(labels)) < len(labels):
        raise ConfigError(f"--artifact {' '.join(args.artifact)}: several need different labels, LABEL=DIR")
    found = []
    for text in args.artifact:
        label, _, path = text.rpartition("=")
        artifact = load_artifact(Path(path))
        if artifact.fingerprint.digest != fingerprint_model(model_dir).digest:
            raise ArtifactError(f"{path} was made for {artifact.fingerprint.name}, not for the model in {model_dir}")
        found.append(Calibrated(label, artifact))
    return found
