"""Time and memory of encoding and decoding a node, next to its matrix products alone.

Products, encoder and decoder take turns, and all times are medians. The products alone are K's and V's, of the same
shapes and dtype, with contiguous operands and in the faster of the two layouts of the weight.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch

from sglang_kvtc.artifact.io import load_artifact
from sglang_kvtc.artifact.schema import Artifact
from sglang_kvtc.benchmarks import synthetic
from sglang_kvtc.benchmarks.memory import peak_memory
from sglang_kvtc.bitstream import bitpack
from sglang_kvtc.bitstream.frame import SectionId, open_frame, write_frame
from sglang_kvtc.bitstream.header import FrameKind
from sglang_kvtc.codec.codec import KVCodec, compute_dtype
from sglang_kvtc.codec.decode import rotated_keys, token_coefficients
from sglang_kvtc.codec.encode import EncodedChunk, centred_features
from sglang_kvtc.codec.rope import Rotation
from sglang_kvtc.codec.transform import SideCoding
from sglang_kvtc.config import CodecConfig
from sglang_kvtc.errors import KVTCError
from sglang_kvtc.types import KVChunk, Side, TokenRange

HELP = "time and memory of encoding and decoding a node, next to its matrix products alone"

START_POSITION = 1000
WARM_UP = 2
PARAMS = (SectionId.K_PARAMS, SectionId.V_PARAMS)
SYMBOLS = (SectionId.K_SYMBOLS, SectionId.V_SYMBOLS)
Node = list[tuple[TokenRange, EncodedChunk]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The default artifact is synthetic, with the geometry and spectra of SmolLM2-135M."""
    parser.add_argument("--artifact", type=Path, help="calibrated artifact (default: a synthetic one)")
    parser.add_argument("--ratio", type=float, default=16.0, help="target ratio (default %(default)g)")
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 4096], metavar="N", help="node sizes")
    parser.add_argument("--chunk-tokens", type=int, default=512, help="most tokens in a frame (default %(default)s)")
    parser.add_argument("--layers-per-step", type=int, default=6, help="layers decoded at once (default %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="torch's threads (default %(default)s)")
    parser.add_argument("--repeats", type=int, default=15, help="passes after the warm-up (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the synthetic KV (default %(default)s)")


def run(args: argparse.Namespace) -> list[dict[str, object]]:
    """Return one row per node size; the nodes are coded throughout, without sinks and window."""
    artifact = load_artifact(args.artifact) if args.artifact else synthetic.artifact(synthetic.SMOLLM2, args.ratio, 0)
    config = CodecConfig(target_ratio=args.ratio, sink_tokens=0, window_tokens=0, chunk_tokens=args.chunk_tokens)
    threads = torch.get_num_threads()
    torch.set_num_threads(args.threads)
    try:
        with torch.inference_mode():
            return [
                _measure(artifact, config, synthetic.chunk(artifact, tokens, START_POSITION, args.seed), args)
                for tokens in args.tokens
            ]
    finally:
        torch.set_num_threads(threads)


def _measure(artifact: Artifact, config: CodecConfig, node: KVChunk, args: argparse.Namespace) -> dict[str, object]:
    codec = KVCodec(artifact, config)
    frames = _encode(codec, node)
    _check_against_fp32(artifact, config, node, frames)
    codings = _codings(artifact, args.ratio, codec)
    stage_chunk = _first_chunk(node, frames)
    stages = _Stopwatch()
    times = _alternate(
        {
            "encode": lambda: _encode(codec, node),
            "decode": lambda: _decode(codec, frames, args.layers_per_step),
            **_products(codings, [len(tokens) for tokens, _ in frames]),
            "stages": lambda: _run_stages(
                artifact, codings, config, stage_chunk, frames[0][1], args.layers_per_step, stages
            ),
        },
        args.repeats,
    )
    encode_gemm = min(times["project, by component"], times["project, by feature"])
    decode_gemm = min(times["reconstruct, by component"], times["reconstruct, by feature"])
    stored_bytes = sum(len(encoded.frame) for _, encoded in frames)
    with peak_memory() as encode_memory:
        for _tokens, _encoded in codec.encode_node(node.keys, node.values, node.start_position):
            pass
    with peak_memory() as decode_memory:
        _decode(codec, frames, args.layers_per_step)
    return {
        "tokens": node.num_tokens,
        "threads": args.threads,
        "encode_over_gemm": times["encode"] / encode_gemm,
        "decode_over_gemm": times["decode"] / decode_gemm,
        "encode_tokens_per_s": node.num_tokens / times["encode"],
        "decode_tokens_per_s": node.num_tokens / times["decode"],
        "encode_ms": 1e3 * times["encode"],
        "encode_gemm_ms": 1e3 * encode_gemm,
        "decode_ms": 1e3 * times["decode"],
        "decode_gemm_ms": 1e3 * decode_gemm,
        "stored_ratio": node.num_tokens * artifact.geometry.bytes_per_token / stored_bytes,
        "encode_peak_bytes": encode_memory.peak_bytes,
        "decode_peak_bytes": decode_memory.peak_bytes,
        "stage_tokens": stage_chunk.num_tokens,
        **{f"stage_{name}_ms": 1e3 * statistics.median(laps[WARM_UP:]) for name, laps in stages.laps.items()},
    }


def _encode(codec: KVCodec, node: KVChunk) -> Node:
    return list(codec.encode_node(node.keys, node.values, node.start_position))


def _decode(codec: KVCodec, frames: Node, layers_per_step: int) -> None:
    for tokens, encoded in frames:
        opened = codec.open(encoded.frame, tokens.start, len(tokens))
        for layers in _layer_blocks(codec.geometry.num_layers, layers_per_step):
            opened.reconstruct(layers, TokenRange(0, len(tokens)))


def _layer_blocks(num_layers: int, layers_per_step: int) -> list[range]:
    return [range(first, min(first + layers_per_step, num_layers)) for first in range(0, num_layers, layers_per_step)]


def _first_chunk(node: KVChunk, frames: Node) -> KVChunk:
    tokens = len(frames[0][0])
    return KVChunk(node.keys[:, :tokens], node.values[:, :tokens], node.start_position)


def _check_against_fp32(artifact: Artifact, config: CodecConfig, node: KVChunk, frames: Node) -> None:
    """The error of the first chunk is at most twice that of the codec in fp32, else the times mean nothing."""
    chunk = _first_chunk(node, frames)
    in_fp32 = KVCodec(artifact, msgspec.structs.replace(config, compute_dtype="float32"))
    codec = KVCodec(artifact, config)
    errors = []
    for each, frame in ((codec, frames[0][1].frame), (in_fp32, in_fp32.encode(chunk, FrameKind.CODED).frame)):
        opened = each.open(frame, chunk.start_position, chunk.num_tokens)
        keys, values = opened.reconstruct(range(artifact.geometry.num_layers), TokenRange(0, chunk.num_tokens))
        errors.append(
            [float((keys - chunk.keys.float()).square().sum()), float((values - chunk.values.float()).square().sum())]
        )
    for side, found, expected in zip(Side, *errors, strict=True):
        if found > 4 * expected:
            raise KVTCError(f"{side.name} is off by {found**0.5:.4g}, in fp32 by {expected**0.5:.4g}: that is too much")


def _alternate(work: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Median seconds of each, after passes that do not count."""
    times: dict[str, list[float]] = defaultdict(list)
    for index in range(repeats + WARM_UP):
        for name, function in work.items():
            started = time.perf_counter()
            function()
            if index >= WARM_UP:
                times[name].append(time.perf_counter() - started)
    return {name: statistics.median(taken) for name, taken in times.items()}


def _codings(artifact: Artifact, ratio: float, codec: KVCodec) -> tuple[SideCoding, SideCoding]:
    """The same as the codec's, which are its own affair."""
    plan = next(plan for plan in artifact.plans if plan.target_ratio == codec.target_ratio)
    dtype = compute_dtype(CodecConfig(), getattr(torch, artifact.geometry.dtype))
    if artifact.k is None or artifact.v is None:
        raise KVTCError(f"the artifact has no bases for ratio {ratio:g}")
    return (
        SideCoding.from_plan(artifact.k, plan.k, artifact.geometry.num_layers, dtype),
        SideCoding.from_plan(artifact.v, plan.v, artifact.geometry.num_layers, dtype),
    )


def _products(codings: tuple[SideCoding, SideCoding], chunks: list[int]) -> dict[str, Callable[[], object]]:
    """Both sides' products of every chunk, for both layouts of the weight."""
    operands = []
    for coding in codings:
        features = coding.transform.empty_features(max(chunks)).flatten(1)
        shape = (coding.transform.num_components, features.shape[1])
        by_component = torch.randn(shape, dtype=torch.float32).to(features.dtype)
        coefficients = torch.randn(len(features), shape[0], dtype=torch.float32).to(features.dtype)
        features.normal_()
        operands.append((features, coefficients, by_component, by_component.T.contiguous()))

    def project(by_feature: bool) -> None:
        for tokens in chunks:
            for features, _, components, transposed in operands:
                torch.mm(features[:tokens], transposed if by_feature else components.T)

    def reconstruct(by_feature: bool) -> None:
        for tokens in chunks:
            for _, coefficients, components, transposed in operands:
                torch.mm(coefficients[:tokens], transposed.T if by_feature else components)

    return {
        "project, by component": lambda: project(False),
        "project, by feature": lambda: project(True),
        "reconstruct, by component": lambda: reconstruct(False),
        "reconstruct, by feature": lambda: reconstruct(True),
    }


class _Stopwatch:
    """Seconds of each stage, one entry per pass."""

    def __init__(self) -> None:
        self.laps: dict[str, list[float]] = defaultdict(list)
        self._last = time.perf_counter()

    def start(self) -> None:
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.laps[name].append(now - self._last)
        self._last = now


def _quantize(coding: SideCoding, coefficients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    quantized = coding.quantizer.quantize(coefficients)
    if quantized is None:
        raise KVTCError("the node has coefficients that the quantiser cannot represent: its frames are RAW")
    return quantized


def _run_stages(
    artifact: Artifact,
    codings: tuple[SideCoding, SideCoding],
    config: CodecConfig,
    chunk: KVChunk,
    encoded: EncodedChunk,
    layers_per_step: int,
    watch: _Stopwatch,
) -> None:
    """One chunk through the steps of encoder and decoder, both sides in each step."""
    geometry, rope = artifact.geometry, artifact.rope
    positions = torch.arange(chunk.start_position, chunk.start_position + chunk.num_tokens)
    watch.start()
    undo = Rotation(positions, rope, geometry.num_kv_heads, inverse=True)
    features = [centred_features(chunk.keys, codings[0], undo), centred_features(chunk.values, codings[1], None)]
    watch.lap("encode_rope_transform")
    coefficients = [coding.transform.project(each) for coding, each in zip(codings, features, strict=True)]
    watch.lap("encode_gemm")
    quantized = [_quantize(coding, each) for coding, each in zip(codings, coefficients, strict=True)]
    watch.lap("encode_quantise")
    packed = [
        bitpack.pack(symbols.numpy(), coding.quantizer.row_widths)
        for coding, (symbols, _) in zip(codings, quantized, strict=True)
    ]
    watch.lap("encode_pack")
    sections = {section: params.numpy() for section, (_, params) in zip(PARAMS, quantized, strict=True)}
    write_frame(
        open_frame(encoded.frame).header,
        {**sections, **dict(zip(SYMBOLS, packed, strict=True))},
        config.coder,
        config.coder_level,
    )
    watch.lap("encode_entropy")

    opened = open_frame(encoded.frame)
    contents = [opened.section(section).copy() for section in PARAMS]
    payload = [opened.section(section) for section in SYMBOLS]
    watch.lap("decode_entropy")
    unpacked = [
        torch.from_numpy(bitpack.unpack(each, coding.quantizer.row_widths, chunk.num_tokens))
        for coding, each in zip(codings, payload, strict=True)
    ]
    watch.lap("decode_unpack")
    rows = [
        token_coefficients(symbols, coding.quantizer.read_params(each, chunk.num_tokens), coding)
        for coding, symbols, each in zip(codings, unpacked, contents, strict=True)
    ]
    watch.lap("decode_dequantise")
    unrotated = [
        [coding.transform.reconstruct(each, layers) for layers in _layer_blocks(geometry.num_layers, layers_per_step)]
        for coding, each in zip(codings, rows, strict=True)
    ]
    watch.lap("decode_gemm")
    redo = Rotation(positions, rope, geometry.num_kv_heads)
    dtype: torch.dtype = getattr(torch, geometry.dtype)
    for block in unrotated[0]:
        rotated_keys(block.unflatten(2, (geometry.num_kv_heads, -1)).transpose(0, 1), redo, slice(None), dtype)
    watch.lap("decode_rope_cast")
