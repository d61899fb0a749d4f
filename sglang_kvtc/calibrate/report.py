"""Artifacts and frames as lines of text for `sglang-kvtc calibrate` and `inspect`."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator

from sglang_kvtc.artifact.schema import Artifact, Plan, SidePlan
from sglang_kvtc.artifact.shard import SHARD_KEY, shard_of
from sglang_kvtc.bitstream.frame import Frame
from sglang_kvtc.bitstream.header import plan_code
from sglang_kvtc.types import ModelGeometry, Side

_JSON_KEYS = ("held_out_error", "domains", SHARD_KEY)
"""Provenance that is no plain text and has lines of its own."""


def describe_artifact(artifact: Artifact) -> list[str]:
    """Geometry, rope, provenance, and every plan with its groups, sizes and errors."""
    fingerprint = artifact.fingerprint
    lines = [
        _field("model", f"{fingerprint.name} ({fingerprint.architecture}, fingerprint {fingerprint.digest})"),
        *_geometry(artifact.geometry),
        _field("rope", _rope(artifact)),
        _field("digest", artifact.digest.hex()),
    ]
    lines += _shard(artifact)
    lines += [_field(key, value) for key, value in artifact.provenance.items() if key not in _JSON_KEYS]
    lines += _domains(artifact)
    size = 0
    for side in Side:
        basis = artifact.basis(side)
        if basis is not None:
            p, rank = basis.basis.shape
            lines.append(_field(f"{side.name} basis", f"{p:,} features, {rank:,} components"))
            tensors = (basis.basis, basis.mean, basis.variances, basis.weights)
            size += sum(tensor.nbytes for tensor in tensors if tensor is not None)
    lines.append(_field("artifact size", f"{size / 1e6:,.1f} MB of tensors"))
    if not artifact.plans:
        lines.append(_field("plans", "none: only lossless coding (target ratio 1)"))
    for plan in artifact.plans:
        lines += _plan(plan, artifact.geometry)
    return lines + list(_held_out(artifact))


def describe_frame(frame: Frame) -> list[str]:
    """Header and section table of a verified frame."""
    header = frame.header
    stop = header.start_position + header.num_tokens
    lines = [
        _field("kind", header.kind.name),
        _field("tokens", f"{header.num_tokens:,}, positions {header.start_position:,} to {stop - 1:,}"),
        _field("plan", f"target ratio {header.plan / plan_code(1.0):g}" if header.plan else "none"),
        _field("geometry", header.geometry_digest.hex()),
        _field("artifact", header.artifact_digest.hex()),
        f"{'section':12}  {'coder':10}  {'stored bytes':>12}  {'raw bytes':>12}",
    ]
    lines += [
        f"{entry.id.name:12}  {entry.coder.name:10}  {entry.stored_bytes:>12,}  {entry.raw_bytes:>12,}"
        for entry in frame.entries.values()
    ]
    return lines


def _geometry(geometry: ModelGeometry) -> list[str]:
    heads = f"{geometry.head_dim}"
    if geometry.v_head_dim != geometry.head_dim:
        heads += f" (K), {geometry.v_head_dim} (V)"
    return [
        _field("geometry", f"{geometry.num_layers} layers, {geometry.num_kv_heads} KV heads, head size {heads}"),
        _field("KV cache", f"{geometry.dtype}, {geometry.bytes_per_token:,} bytes per token"),
    ]


def _rope(artifact: Artifact) -> str:
    rope = artifact.rope
    pairs = "interleaved" if rope.interleaved else "NeoX"
    factor = f", attention factor {rope.attention_factor:g}" if rope.attention_factor != 1 else ""
    return f"{rope.kind}, {rope.rotary_dim} rotary channels, {pairs} pairs{factor}"


def _shard(artifact: Artifact) -> Iterator[str]:
    shard = shard_of(artifact.provenance)
    if shard is not None:
        layers, kv_heads = (f"{start} to {stop - 1}" for start, stop in (shard.layers, shard.kv_heads))
        ranks = f"tp rank {shard.tp_rank} of {shard.tp_size}, pp rank {shard.pp_rank} of {shard.pp_size}"
        yield _field("shard", f"{ranks}: layers {layers}, KV heads {kv_heads}")


def _domains(artifact: Artifact) -> Iterator[str]:
    for domain in json.loads(artifact.provenance.get("domains", "[]")):
        yield _field(
            "domain",
            f"{domain['name']}: {domain['documents']:,} documents, {domain['tokens']:,} tokens, "
            f"{domain['long_tokens'] / domain['tokens']:.0%} of them in long sequences",
        )


def _plan(plan: Plan, geometry: ModelGeometry) -> Iterator[str]:
    bits = sum(plan.side(side).planned_bits for side in Side)
    elements = sum(geometry.features(side) for side in Side)
    when = "after entropy coding of the sample" if plan.k.step else "before entropy coding"
    size = (
        f"{math.ceil(bits / 8):,} bytes per token {when} ({16 * elements / bits:.2f}x)" if bits else "nothing is coded"
    )
    yield f"target ratio {plan.target_ratio:g}: {size}"
    for side in Side:
        side_plan = plan.side(side)
        step = f" of step {side_plan.step:.4g}" if side_plan.step else ""
        yield (
            f"  {side.name}: {len(side_plan.columns):,} components in {len(side_plan.groups)} groups{step}, "
            f"predicted error {side_plan.predicted_error:.4f} of the variance"
        )
        yield f"     {_groups(side_plan)}"


def _groups(plan: SidePlan) -> str:
    """Groups as `count x size at width bits`, in coding order, equal neighbours counted together."""
    counts = Counter((group.size, group.width) for group in plan.groups)
    return ", ".join(f"{count} x {size} at {width} bits" for (size, width), count in counts.items()) or "no groups"


def _held_out(artifact: Artifact) -> Iterator[str]:
    for error in json.loads(artifact.provenance.get("held_out_error", "[]")):
        low, high = error.get("ratio_range", (error["ratio"], error["ratio"]))
        yield (
            f"held-out text at target ratio {error['target_ratio']:g}: {error['ratio']:.2f}x with every stored byte "
            f"({low:.2f}x to {high:.2f}x by sequence)"
        )
        for side in Side:
            name = side.name.lower()
            layers = " ".join(f"{value:.3f}" for value in error[f"{name}_layers"])
            yield f"  {side.name}: error {error[name]:.4f} of the variance; by layer {layers}"


def _field(name: str, value: str) -> str:
    return f"{name:16} {value}"
