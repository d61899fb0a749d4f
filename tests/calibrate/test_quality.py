"""The storage harness, its baselines, and the numbers the codec must reach with it on a real model."""

import argparse
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from sglang_kvtc.artifact.schema import RopeSpec
from sglang_kvtc.benchmarks.baselines import Coded, fp8, integer
from sglang_kvtc.benchmarks.harness import SINK_TOKENS, WINDOW_TOKENS, Passage, evaluate, load_passages, summarize
from sglang_kvtc.benchmarks.routines import quality
from sglang_kvtc.calibrate.causal_lm import load_model
from sglang_kvtc.calibrate.corpus import Document
from sglang_kvtc.errors import ConfigError

ROPE = RopeSpec("default", 16, tuple(10000 ** (-channel / 16) for channel in range(0, 16, 2)))
PREFIX_TOKENS, SUFFIX_TOKENS = 200, 30


def random_cache(num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shape = (2, num_tokens, 3, 16)
    keys, values = (torch.randn(shape, generator=generator).bfloat16() for _ in range(2))
    return keys, values


def test_fp8_stores_one_byte_per_element_and_errs_by_half_a_step() -> None:
    keys, values = random_cache(40)
    coded = fp8(keys, values, 0)
    assert coded.stored_bytes == keys.numel() + values.numel()
    # e4m3 has three explicit mantissa bits, and steps of 2**-9 below its smallest normal number.
    bound = (keys.float().abs() * 2**-4).clamp(min=2**-10)
    assert bool(((coded.keys.float() - keys.float()).abs() <= bound).all())


@pytest.mark.parametrize("num_bits", [2, 4])
def test_integer_codes_count_symbols_scales_and_zero_points(num_bits: int) -> None:
    keys, values = random_cache(64)
    coded = integer(keys, values, 0, rope=ROPE, num_bits=num_bits)
    # K: 64 tokens make two groups per channel. V: a head of 16 channels is one group per token.
    num_channels, num_heads = keys[:, 0].numel(), values[..., 0].numel()
    symbols = (keys.numel() + values.numel()) * num_bits // 8
    assert coded.stored_bytes == symbols + (2 * num_channels + num_heads) * 4
    assert coded.keys.shape == keys.shape
    assert coded.keys.dtype == keys.dtype


def test_integer_codes_err_by_half_a_step_of_their_group() -> None:
    _, values = random_cache(50)
    coded = integer(values, values, 7, rope=ROPE, num_bits=4)
    rows = values.float()
    steps = (rows.amax(dim=-1, keepdim=True) - rows.amin(dim=-1, keepdim=True)) / 15
    # Half a step, plus the rounding of scale and zero point to f16 and of the result to bf16.
    rounding = rows.abs().amax() * (2**-11 * 2 + 2**-9)
    assert bool(((coded.values.float() - rows).abs() <= steps / 2 + rounding).all())


def test_constant_groups_are_kept() -> None:
    constant = torch.full((1, 40, 1, 16), 0.5, dtype=torch.bfloat16)
    assert torch.equal(integer(constant, constant, 0, rope=ROPE, num_bits=2).values, constant)


@pytest.fixture(scope="module")
def model(tiny_llama: Path) -> object:
    return load_model(tiny_llama, "float32")


@pytest.fixture(scope="module")
def passage(model: object, tokenizer: PreTrainedTokenizerFast) -> Passage:
    documents = [
        Document("a", "short", "x" * (PREFIX_TOKENS + SUFFIX_TOKENS - 1)),
        Document("a", "long", "the quick brown fox jumps over the lazy dog; " * 10),
    ]
    (found,) = load_passages(
        model,
        tokenizer,
        documents,
        count=1,
        prefix_tokens=PREFIX_TOKENS,
        suffix_tokens=SUFFIX_TOKENS,
        cache_dtype=torch.bfloat16,
        seed=0,
    )
    return found


def unchanged(keys: torch.Tensor, values: torch.Tensor, start_position: int) -> Coded:
    return Coded(keys, values, 2 * (keys.numel() + values.numel()))


def test_documents_too_short_are_passed_over_and_too_few_are_refused(
    passage: Passage, model: object, tokenizer: PreTrainedTokenizerFast
) -> None:
    assert passage.name == "long"
    with pytest.raises(ConfigError, match="0 held-out documents have 230 tokens, 1 were asked for"):
        load_passages(
            model,
            tokenizer,
            [Document("a", "short", "x")],
            count=1,
            prefix_tokens=PREFIX_TOKENS,
            suffix_tokens=SUFFIX_TOKENS,
            cache_dtype=torch.bfloat16,
            seed=0,
        )


def test_unchanged_cache_scores_perfectly_at_ratio_one(passage: Passage, model: object) -> None:
    row = summarize([evaluate(model, passage, unchanged)])
    assert row == {"ratio": 1.0, "kl": 0.0, "dnll": 0.0, "top1": 1.0, "whole_prefix_ratio": 1.0}


def test_only_the_middle_of_the_prefix_is_coded(passage: Passage, model: object) -> None:
    seen: list[tuple[int, int]] = []

    def erased(keys: torch.Tensor, values: torch.Tensor, start_position: int) -> Coded:
        seen.append((start_position, keys.shape[1]))
        return Coded(torch.zeros_like(keys), torch.zeros_like(values), keys.numel())

    row = summarize([evaluate(model, passage, erased)])
    coded_tokens = PREFIX_TOKENS - SINK_TOKENS - WINDOW_TOKENS
    assert seen == [(SINK_TOKENS, coded_tokens)]
    assert row["kl"] > 0
    assert row["ratio"] == 4.0
    raw_tokens = PREFIX_TOKENS - coded_tokens
    assert row["whole_prefix_ratio"] == pytest.approx(PREFIX_TOKENS / (raw_tokens + coded_tokens / 4))


def test_a_num_08_codec_reaches_its_quality_on_a_real_model() -> None:
    """The goal of design.md section 7, with one calibration that later runs read from the cache folder."""
    parser = argparse.ArgumentParser()
    quality.add_arguments(parser)
    rows = quality.run(parser.parse_args([]))
    kvtc = {row["target_ratio"]: row for row in rows if row["method"] == "kvtc"}
    baselines = {row["method"]: row for row in rows if row["method"] != "kvtc"}

    assert kvtc[16]["ratio"] >= 17
    assert kvtc[16]["kl"] <= 0.12 * baselines["int2"]["kl"]
    by_ratio = [kvtc[target] for target in sorted(kvtc)]
    assert [row["kl"] for row in by_ratio] == sorted(row["kl"] for row in by_ratio)
    assert [row["ratio"] for row in by_ratio] == sorted(row["ratio"] for row in by_ratio)
    # Three times smaller than the 2-bit baseline and still closer to the full cache.
    assert kvtc[32]["ratio"] > 3 * baselines["int2"]["ratio"]
    assert kvtc[32]["kl"] < baselines["int2"]["kl"]
    assert baselines["fp8"]["ratio"] == 2.0
