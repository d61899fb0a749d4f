"""The same input gives the same bytes: twice, in threads at the same time, and in other processes."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from bitstream.sample_frames import CODERS, frame
from codec.toy_model import make_artifact, make_chunk

from sglang_kvtc.bitstream.header import FrameKind
from sglang_kvtc.codec.codec import KVCodec
from sglang_kvtc.config import CodecConfig

TESTS = Path(__file__).parents[1]
SEEDS = range(4)


def written() -> list[str]:
    """Digests of frames of every kind and coder, small and larger than a probe of the DEFLATE strategies."""
    return [
        hashlib.sha256(frame(kind, tokens, seed=seed, coder=coder)).hexdigest()
        for kind in FrameKind
        for coder in CODERS
        for tokens, seed in ((1, 0), (24, 1), (2000, 2))
    ]


def test_frames_are_the_same_in_threads_at_the_same_time() -> None:
    expected = written()
    with ThreadPoolExecutor(8) as threads:
        futures = [threads.submit(written) for _ in range(8)]
    assert all(future.result() == expected for future in futures)


def test_frames_are_the_same_in_other_processes() -> None:
    command = [sys.executable, "-c", "from bitstream.test_determinism import written; print(*written())"]
    processes = []
    for hash_seed in "12":
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(TESTS)}
        processes.append(subprocess.Popen(command, env=environment, cwd=TESTS, stdout=subprocess.PIPE, text=True))
    expected = written()
    for process in processes:
        printed, _ = process.communicate(timeout=120)
        assert printed.split() == expected


@pytest.mark.parametrize("coder", CODERS)
@pytest.mark.parametrize("kind", FrameKind)
def test_a_codec_that_threads_share_gives_each_the_same_bytes(kind: FrameKind, coder: str) -> None:
    artifact = make_artifact()
    codec = KVCodec(artifact, CodecConfig(coder=coder))
    chunks = [make_chunk(artifact, 100, seed=seed) for seed in SEEDS]
    expected = [codec.encode(chunk, kind).frame for chunk in chunks]
    assert [KVCodec(artifact, CodecConfig(coder=coder)).encode(chunk, kind).frame for chunk in chunks] == expected

    def encode_all(_: int) -> list[bytes]:
        with torch.inference_mode():
            return [codec.encode(chunk, kind).frame for chunk in chunks]

    with ThreadPoolExecutor(4) as threads:
        assert all(frames == expected for frames in threads.map(encode_all, SEEDS))
