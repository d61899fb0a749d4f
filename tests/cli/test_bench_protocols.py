"""`sglang-kvtc bench protocols` on a tiny model: coding once, every few tokens, and turn by turn."""

import argparse
from pathlib import Path
from typing import Any

import pytest
import torch
from calibrate.tiny_llama import byte_tokenizer

from sglang_kvtc.artifact.schema import Artifact
from sglang_kvtc.benchmarks import protocols
from sglang_kvtc.benchmarks.baselines import CodedCache
from sglang_kvtc.benchmarks.harness import Passage, compare_positions, load_passages
from sglang_kvtc.benchmarks.registry import load
from sglang_kvtc.bitstream.header import FrameKind
from sglang_kvtc.calibrate.corpus import Document
from sglang_kvtc.codec.codec import KVCodec
from sglang_kvtc.config import CodecConfig
from sglang_kvtc.errors import ConfigError
from sglang_kvtc.types import KVChunk

Row = dict[str, Any]
PREFIX_TOKENS, SUFFIX_TOKENS = 120, 48
SMALL = (
    *("--documents", "2", "--prefix-tokens", str(PREFIX_TOKENS), "--suffix-tokens", str(SUFFIX_TOKENS)),
    *("--window", "32", "--interval", "16", "--turn-tokens", "40", "--methods", "fp8,kvtc4"),
)


@pytest.fixture(scope="module")
def passage(model: Any) -> Passage:
    text = "the quick brown fox jumps over the lazy dog; pack my box with five dozen liquor jugs. " * 4
    (found,) = load_passages(
        model,
        byte_tokenizer(),
        [Document("a", "long", text)],
        count=1,
        prefix_tokens=PREFIX_TOKENS,
        suffix_tokens=SUFFIX_TOKENS,
        cache_dtype=torch.bfloat16,
        seed=0,
    )
    return found


@pytest.fixture(scope="module")
def rows(model_dir: Path, artifact: Artifact) -> list[Row]:
    return run(model_dir)


def run(model_dir: Path, *arguments: str) -> list[Row]:
    module = load("protocols")
    parser = argparse.ArgumentParser()
    module.add_arguments(parser)
    paths = ("--model", str(model_dir), "--artifact", str(model_dir.parent / "artifact"))
    return module.run(parser.parse_args((*paths, *SMALL, *arguments)))


def test_rows_hold_every_protocol_and_method(rows: list[Row]) -> None:
    assert [(row["protocol"], row["method"]) for row in rows] == [
        ("once", "full cache"),
        ("once", "fp8"),
        ("once", "kvtc 4x"),
        ("every 16", "fp8"),
        ("every 16", "kvtc 4x"),
        ("turns of 40, coded window", "kvtc 4x"),
        ("turns of 40, fp8 window", "kvtc 4x"),
        ("turns of 40, raw window", "kvtc 4x"),
    ]
    full, *others = rows
    assert (full["kl"], full["dnll"], full["top1"], full["ratio"]) == (0, 0, 1, 1)
    assert all(row["kl"] > 0 and row["kl_se"] > 0 and row["ratio"] > 1 for row in others)
    by_window = {row["protocol"]: row for row in others}
    # Raw windows cost the most bytes. With a single plan, a coded one is coded like all else.
    coded, fp8, raw = (by_window[f"turns of 40, {format} window"] for format in ("coded", "fp8", "raw"))
    assert raw["ratio"] < fp8["ratio"] < coded["ratio"]
    assert fp8["ratio"] == fp8["whole_ratio"]


def test_bins_of_positions_add_up_to_the_whole(model_dir: Path, rows: list[Row]) -> None:
    binned = run(model_dir, "--bin-tokens", "20")
    assert len(binned) == 3 * len(rows)
    for row, start in zip(rows, range(0, len(binned), 3), strict=True):
        bins = binned[start : start + 3]
        assert [one["position"] for one in bins] == [120, 140, 160]
        assert [one["tokens"] for one in bins] == [40, 40, 16]
        for name in ("kl", "top1"):
            mean = sum(one[name] * one["tokens"] for one in bins) / sum(one["tokens"] for one in bins)
            assert mean == pytest.approx(row[name], abs=1e-6)
        # The last token of a document is not followed by one whose likelihood could have changed.
        increase = (bins[0]["dnll"] * 20 + bins[1]["dnll"] * 20 + bins[2]["dnll"] * 7) / 47
        assert increase == pytest.approx(row["dnll"], abs=1e-6)
        assert all(one["nll"] > 0 for one in bins)


def test_coding_every_few_tokens_codes_all_there_is(model: Any, passage: Passage) -> None:
    seen: list[int] = []

    def coder(keys: torch.Tensor, values: torch.Tensor) -> CodedCache:
        seen.append(keys.shape[1])
        return CodedCache(keys, values, 100 * len(seen), 50)

    reading = protocols.every(model, passage, coder, 20)
    assert seen == [120, 140, 160]
    assert reading.sizes.columns()["ratio"] == 6
    assert reading.log_probs.shape == passage.log_probs.shape
    # Nothing but the rounding of the new tokens to the cache's dtype, as any engine has it.
    changes = compare_positions(passage.log_probs, reading.log_probs, passage.suffix)
    assert float(changes.kl[:20].max()) < 1e-6 < 1e-4 < float(passage.log_probs.exp().std())


def test_errors_add_up_where_everything_is_coded_again(model: Any, passage: Passage) -> None:
    def noisy(keys: torch.Tensor, values: torch.Tensor) -> CodedCache:
        noise = torch.randn(keys.shape, generator=torch.Generator().manual_seed(keys.shape[1]))
        return CodedCache(keys + 0.2 * noise.to(keys), values, 2, 1)

    kl_once, kl_often = (
        compare_positions(passage.log_probs, reading.log_probs, passage.suffix).sums().kl
        for reading in (protocols.once(model, passage, noisy), protocols.every(model, passage, noisy, 2))
    )
    assert kl_often > kl_once


def test_turns_of_a_lossless_tier_change_nothing(model: Any, passage: Passage, artifact: Artifact) -> None:
    codec = KVCodec(artifact, CodecConfig(target_ratio=1))
    by_tier = protocols.turns(model, passage, codec, 20, 32)
    by_nothing = protocols.every(model, passage, lambda keys, values: CodedCache(keys, values, 0, 0), 20)
    assert torch.equal(by_tier.log_probs, by_nothing.log_probs)
    assert by_tier.sizes.whole == 2 * 2 * (PREFIX_TOKENS + SUFFIX_TOKENS) * 128


def test_each_turn_is_a_node_with_a_window_and_only_the_first_has_sinks(
    model: Any, passage: Passage, artifact: Artifact
) -> None:
    class Recorder(KVCodec):
        def encode(self, chunk: KVChunk, kind: FrameKind, plan: int = 0) -> Any:
            encoded.append((kind, chunk.start_position, chunk.num_tokens))
            result = super().encode(chunk, kind, plan)
            stored.append(len(result.frame))
            return result

    encoded: list[tuple[FrameKind, int, int]] = []
    stored: list[int] = []
    codec = Recorder(artifact, CodecConfig(target_ratio=4, window_tokens=16, window_format="fp8"))
    reading = protocols.turns(model, passage, codec, 36, min_coded_tokens=20)
    assert encoded == [
        (FrameKind.RAW, 0, 4),
        (FrameKind.CODED, 4, 100),
        (FrameKind.FP8, 104, 16),
        (FrameKind.CODED, 120, 20),
        (FrameKind.FP8, 140, 16),
        # Too short a node to code any of it.
        (FrameKind.FP8, 156, 12),
    ]
    assert reading.sizes.stored == sum(stored)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--window", "8"), "--window 8: expected at least 16"),
        (("--interval", "0"), "--interval 0: expected at least 1"),
        (("--turn-tokens", "0"), "--turn-tokens 0: expected at least 1"),
        (("--prefix-tokens", "36"), "--prefix-tokens 36: expected at least 37"),
        (("--suffix-tokens", "1"), "--suffix-tokens 1: expected at least 2"),
    ],
)
@pytest.mark.usefixtures("artifact")
def test_sizes_that_cannot_be_are_refused(model_dir: Path, flags: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run(model_dir, *flags)
