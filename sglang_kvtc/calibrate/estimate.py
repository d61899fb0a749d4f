"""What a calibration will take, from a model's configuration alone: memory, time and the size of the artifact.

Memory is that of the tensors which grow with the model; time is arithmetic divided by rates that are measured on this
machine for about a second, so a busy machine or a small cache makes it longer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoModelForCausalLM

from sglang_kvtc.artifact.schema import GROUP_SIZES
from sglang_kvtc.artifact.shard import shards_of
from sglang_kvtc.calibrate.causal_lm import DTYPES, load_config, model_geometry
from sglang_kvtc.calibrate.collect import distinct_parts
from sglang_kvtc.calibrate.fit import SideFit
from sglang_kvtc.calibrate.gather import HELD_OUT_TOKENS
from sglang_kvtc.calibrate.pca import BLOCK_ROWS, ITERATIONS, oversampled_rank
from sglang_kvtc.calibrate.plans import budget_bits
from sglang_kvtc.calibrate.sensitivity import CONTINUATION_ONE_IN, NUM_SEQUENCES
from sglang_kvtc.calibrate.settings import MAX_RANK, Calibration, planned_pca_rows
from sglang_kvtc.calibrate.statistics import SideStatistics
from sglang_kvtc.calibrate.uniform_plans import SEARCH_STEPS, StepTrial
from sglang_kvtc.codec.allocate import SAMPLE_TOKENS, Allocator, error_table
from sglang_kvtc.errors import ConfigError
from sglang_kvtc.types import ModelGeometry, Side

_MEASURE_SECONDS = 0.2
_GEMM_SIZE = 1024
_EIGH_SIZE = 512
_TABLE_RANK = 128
_ALLOCATOR_BITS = 4096
_F16, _F32, _F64 = 2, 4, 8


@dataclass(frozen=True, slots=True)
class Rates:
    """What this machine does in a second.

    forward, gemm: FLOP in products of the model's dtype and of f32. eigh: of an f32 eigendecomposition of n features,
    in n^3. table: elements of the allocation sample quantised at all widths. allocator: components x bits of budget.
    trial: elements of the allocation sample coded at one step.
    """

    forward: float
    gemm: float
    eigh: float
    table: float
    allocator: float
    trial: float


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage of a calibration: most bytes in use meanwhile, and how long it takes."""

    name: str
    peak_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Estimate:
    """What all stages take. pca_rows: None for an exact PCA.

    model_bytes: weights. statistics_bytes: of all parts. artifact_bytes: most that the artifact of one of the `ranks`
    can take, with every fitted component in some plan.
    """

    geometry: ModelGeometry
    model_bytes: int
    statistics_bytes: int
    pca_rows: int | None
    artifact_bytes: int
    ranks: int
    rates: Rates
    stages: tuple[Stage, ...]

    @property
    def peak_bytes(self) -> int:
        return max(stage.peak_bytes for stage in self.stages)

    @property
    def seconds(self) -> float:
        return sum(stage.seconds for stage in self.stages)


@dataclass(frozen=True, slots=True)
class _Cost:
    """Bytes that a step needs beside what is kept, and its seconds."""

    bytes: int
    seconds: float


def estimate(settings: Calibration) -> Estimate:
    """Plan a calibration. Reads config.json and no weights.

    Raises what `calibrate_shards` raises for the settings, and ConfigError for those that run no model over text.
    """
    if settings.is_lossless or settings.merge:
        what = "--merge fits what is collected already" if settings.merge else "--ratio 1 needs no calibration"
        raise ConfigError(f"--dry-run plans passes over text: {what}")
    config = load_config(settings.model_dir)
    whole = model_geometry(config)
    shards = shards_of(whole, settings.tp_size, settings.pp_size)
    parts = [shard.geometry(whole) for shard in distinct_parts(shards)]
    pca_rows = planned_pca_rows(settings, whole, parts)
    rates = measure_rates(settings)
    num_parameters, flop_per_token = _model_size(config, settings.max_length)

    model_bytes = num_parameters * DTYPES[settings.dtype].itemsize
    statistics_bytes = sum(
        SideStatistics.planned_bytes(part.features(side), pca_rows) for part in parts for side in Side
    )
    # K and V of a sequence: as the model keeps them, stacked, in f32, and without rotation.
    features = sum(whole.features(side) for side in Side)
    sequence_bytes = settings.max_length * features * (2 * DTYPES[settings.dtype].itemsize + 2 * _F32)
    collecting = settings.num_tokens * flop_per_token / rates.forward
    if pca_rows is None:
        # One triangle of a product of p x p.
        collecting += (
            sum(settings.num_tokens * part.features(side) ** 2 for part in parts for side in Side) / rates.gemm
        )
    kept = model_bytes + statistics_bytes
    stages = [Stage("forward passes", kept + sequence_bytes, collecting)]
    if settings.preset == "sensitivity":
        stages.append(_sensitivity_stage(settings, config, kept, flop_per_token, rates))
    for side in Side:
        pca = [_pca_cost(settings, part, side, pca_rows, rates) for part in parts]
        allocation = [_allocation_cost(settings, part, side, pca_rows, rates) for part in parts]
        stages.append(_in_turn(f"{side.name}: PCA", kept, pca))
        # The basis in fp16 stays from here on.
        kept += sum(_rank(settings, part, side, pca_rows) * part.features(side) * _F16 for part in parts)
        stages.append(_in_turn(f"{side.name}: plans", kept, allocation))
    columns = sum(_rank(settings, part, side, pca_rows) * part.features(side) for part in parts for side in Side)
    num_plans = _num_plans(settings)
    coding = num_plans * HELD_OUT_TOKENS * 4 * columns / rates.gemm
    checking = HELD_OUT_TOKENS * flop_per_token / rates.forward + coding
    stages.append(Stage("held-out error", kept + sequence_bytes + num_plans * columns * _F32, checking))
    return Estimate(
        geometry=whole,
        model_bytes=model_bytes,
        statistics_bytes=statistics_bytes,
        pca_rows=pca_rows,
        artifact_bytes=max(_artifact_bytes(settings, part, pca_rows) for part in parts),
        ranks=len(shards),
        rates=rates,
        stages=tuple(stages),
    )


def _num_plans(settings: Calibration) -> int:
    """At most: one of those that errors give may be as fine as the plan of windows."""
    by_error = len(settings.target_errors)
    return by_error + (settings.window_ratio > 0) if by_error else len(settings.ratio_pairs)


def describe_estimate(estimate: Estimate) -> list[str]:
    """The estimate as lines of text."""
    geometry, rates = estimate.geometry, estimate.rates
    pca = "exact" if estimate.pca_rows is None else f"randomized, on {estimate.pca_rows:,} sampled rows"
    lines = [
        f"geometry         {geometry.num_layers} layers, {geometry.num_kv_heads} KV heads: "
        f"{geometry.features(Side.K):,} features of K, {geometry.features(Side.V):,} of V",
        f"PCA              {pca}",
        f"weights          {_gigabytes(estimate.model_bytes)}",
        f"statistics       {_gigabytes(estimate.statistics_bytes)}",
        f"measured rates   {rates.forward / 1e9:,.0f} GFLOP/s in the model's dtype, {rates.gemm / 1e9:,.0f} in float32",
        f"{'stage':24}  {'peak memory':>12}  {'time':>10}",
    ]
    lines += [
        f"{stage.name:24}  {_gigabytes(stage.peak_bytes):>12}  {_duration(stage.seconds):>10}"
        for stage in estimate.stages
    ]
    lines.append(f"{'all':24}  {_gigabytes(estimate.peak_bytes):>12}  {_duration(estimate.seconds):>10}")
    artifacts = "artifact" if estimate.ranks == 1 else f"each of {estimate.ranks} artifacts"
    lines.append(f"{artifacts}: at most {_gigabytes(estimate.artifact_bytes)}")
    return lines


def measure_rates(settings: Calibration) -> Rates:
    """Run each kind of work for a moment on the device and with the threads that the calibration would use."""
    device = torch.device(settings.device)
    features = torch.randn(_EIGH_SIZE, _EIGH_SIZE, generator=torch.Generator().manual_seed(0)).to(device)
    symmetric = features @ features.T
    coefficients = np.random.default_rng(0).standard_normal((SAMPLE_TOKENS, _TABLE_RANK), np.float32)
    coefficients *= np.arange(1, _TABLE_RANK + 1, dtype=np.float32) ** -0.5
    table = error_table(coefficients)
    flop = 2 * _GEMM_SIZE**3
    return Rates(
        forward=flop / _seconds(_product(DTYPES[settings.dtype], device), device),
        gemm=flop / _seconds(_product(torch.float32, device), device),
        eigh=_EIGH_SIZE**3 / _seconds(lambda: torch.linalg.eigh(symmetric), device),
        table=_table_elements(_TABLE_RANK) / _seconds(lambda: error_table(coefficients), device),
        allocator=_TABLE_RANK * _ALLOCATOR_BITS / _seconds(lambda: Allocator(table, _ALLOCATOR_BITS), device),
        trial=coefficients.size / _seconds(_trial(coefficients), device),
    )


def _trial(coefficients: npt.NDArray[np.float32]) -> Callable[[], object]:
    """Code a sample at a step of the usual size."""
    variances = np.square(coefficients).mean(axis=0)
    variances = np.sort(variances)[::-1].copy()
    no_basis = np.zeros((len(variances), 0), np.float16)
    fit = SideFit(
        Side.K,
        None,
        np.zeros(len(variances), np.float32),
        no_basis,
        variances,
        1.0,
        coefficients,
        float(variances.sum()),
    )
    trial = StepTrial.of(fit)
    return lambda: trial.plan(float(np.sqrt(variances[len(variances) // 4])))


def _product(dtype: torch.dtype, device: torch.device) -> Callable[[], object]:
    left = torch.ones(_GEMM_SIZE, _GEMM_SIZE, dtype=dtype, device=device)
    return lambda: left @ left


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    """Median of a few runs after one that warms up."""

    def once() -> float:
        start = time.perf_counter()
        work()
        if device.type != "cpu":
            torch.get_device_module(device).synchronize()
        return time.perf_counter() - start

    once()
    runs: list[float] = []
    while sum(runs) < _MEASURE_SECONDS:
        runs.append(once())
    return float(np.median(runs))


def _model_size(config: Any, max_length: int) -> tuple[int, int]:
    """Parameters, and FLOP per token of a forward pass without logits, all experts of a mixture counted."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    multiplied = sum(parameter.numel() for parameter in model.base_model.parameters())
    multiplied -= model.get_input_embeddings().weight.numel()
    geometry = model_geometry(config)
    # Scores and weighted values of half of the earlier tokens on average.
    per_key = geometry.head_dim + geometry.v_head_dim
    attention = geometry.num_layers * config.num_attention_heads * per_key * max_length
    return num_parameters, 2 * multiplied + attention


def _sensitivity_stage(settings: Calibration, config: Any, kept: int, flop_per_token: int, rates: Rates) -> Stage:
    """Passes over contexts and, three times as long, forward and backward ones over their continuations."""
    geometry = model_geometry(config)
    continuation = settings.max_length // CONTINUATION_ONE_IN
    context = settings.max_length - continuation
    features = sum(geometry.features(side) for side in Side)
    # K and V, copies to differentiate by, what the model adds to them, and gradients, which are converted to f32.
    cached = context * features * (4 * DTYPES[settings.dtype].itemsize + 2 * _F32)
    logits = 3 * continuation * config.vocab_size * _F32
    blocks = NUM_SEQUENCES * _weights_bytes(geometry, _F64)
    flop = NUM_SEQUENCES * (context + 3 * continuation) * flop_per_token
    return Stage("sensitivity", kept + cached + logits + blocks, flop / rates.forward)


def _weights_bytes(part: ModelGeometry, element_bytes: int) -> int:
    """A matrix for every KV head of K and of V."""
    heads = part.num_layers * part.num_kv_heads
    return heads * (part.head_dim**2 + part.v_head_dim**2) * element_bytes


def _rank(settings: Calibration, part: ModelGeometry, side: Side, pca_rows: int | None) -> int:
    most = settings.num_tokens if pca_rows is None else pca_rows - 1
    return min(settings.rank or MAX_RANK, part.features(side), most)


def _groups(settings: Calibration, part: ModelGeometry, side: Side) -> Iterator[int]:
    """Features of each PCA."""
    per_layer = part.features(side) // part.num_layers
    step = settings.layers_per_group or part.num_layers
    for first in range(0, part.num_layers, step):
        yield (min(first + step, part.num_layers) - first) * per_layer


def _pca_cost(settings: Calibration, part: ModelGeometry, side: Side, pca_rows: int | None, rates: Rates) -> _Cost:
    features, rank = part.features(side), _rank(settings, part, side, pca_rows)
    merged = features * rank * _F32
    costs = []
    for p in _groups(settings, part, side):
        r = min(rank, p)
        if pca_rows is None:
            # LAPACK's input, output and workspace of 2 n^2, then the basis in order and its product with the matrix.
            costs.append(
                _Cost(_F32 * max(4 * p * p, 2 * p * p + 3 * p * r), p**3 / rates.eigh + 2 * p * p * r / rates.gemm)
            )
        else:
            columns = oversampled_rank(r, p, pca_rows)
            gram = columns * columns
            # Basis and image with what QR makes of them, or the small matrix with its vectors and workspace.
            held = max(4 * p * columns * _F32, 2 * p * columns * _F32 + 5 * gram * _F64) + 3 * BLOCK_ROWS * p * _F32
            flop = ITERATIONS * 4 * pca_rows * p * columns
            flop += (ITERATIONS + 1) * 4 * p * gram  # Householder QR, factors and Q
            flop += 2 * pca_rows * (p * columns + gram) + 2 * p * columns * r
            costs.append(_Cost(held, flop / rates.gemm + columns**3 / rates.eigh))
    covariance = features * features * _F32 if pca_rows is None else 0
    return _Cost(covariance + merged + max(cost.bytes for cost in costs), sum(cost.seconds for cost in costs))


def _allocation_cost(
    settings: Calibration, part: ModelGeometry, side: Side, pca_rows: int | None, rates: Rates
) -> _Cost:
    features, rank = part.features(side), _rank(settings, part, side, pca_rows)
    sample = SAMPLE_TOKENS * (features + rank) * _F32
    if settings.preset == "sensitivity":
        # The sample in order, what it decodes to, the error in f64, and symbols, packed and coded.
        trial = SAMPLE_TOKENS * rank * (3 * _F32 + _F64)
        seconds = SEARCH_STEPS * _num_plans(settings) * SAMPLE_TOKENS * rank / rates.trial
        return _Cost(sample + features * rank * _F32 + trial, seconds)
    if settings.target_errors:
        bits = budget_bits(features, 1)
    elif settings.shares_bits:
        bits = max(budget_bits(sum(part.features(other) for other in Side), ratio) for ratio, _ in settings.ratio_pairs)
    else:
        bits = max(budget_bits(features, pair[side]) for pair in settings.ratio_pairs)
    seconds = _table_elements(rank) / rates.table + rank * bits / rates.allocator
    return _Cost(sample + features * rank * _F32 + rank * bits, seconds)


def _table_elements(rank: int) -> int:
    """Components that the error table quantises: every start of size 1 and 16 starts per size of the larger groups."""
    sizes = [size for size in GROUP_SIZES if size <= rank]
    return sum(rank if size == 1 else 16 * rank for size in sizes)


def _artifact_bytes(settings: Calibration, part: ModelGeometry, pca_rows: int | None) -> int:
    """Tensors of both sides when some plan codes the last component: f16 basis; f32 mean, variances and weights."""
    total = _weights_bytes(part, _F32) if settings.preset == "sensitivity" else 0
    for side in Side:
        features, rank = part.features(side), _rank(settings, part, side, pca_rows)
        total += features * rank * _F16 + (features + rank) * _F32
    return total


def _in_turn(name: str, kept: int, costs: Sequence[_Cost]) -> Stage:
    return Stage(name, kept + max(cost.bytes for cost in costs), sum(cost.seconds for cost in costs))


def _gigabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:,.2f} GB"


def _duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:,.0f} min" if seconds < 6000 else f"{seconds / 3600:,.1f} h"
