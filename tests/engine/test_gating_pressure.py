"""Gated eviction with the tier when everything is short: requests are retracted, and the arena is full."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from sglang_kvtc.benchmarks.prompts import builtin_prompts
from tests.engine.conftest import Server

pytestmark = pytest.mark.engine

POOL = 2600
ARENA = 4_000_000
NEW_TOKENS = 30
CONFIG = f"""
[codec]
target_ratio = 16
[tier]
stale_after_s = 0.0
arena_bytes = {ARENA}
staging_bytes = 3000000
"""


def test_retracted_requests_start_again_and_a_full_arena_costs_hits_only(
    start_server: Callable[..., Server], artifact: Path, gates: Path, demo_model: Path
) -> None:
    """The engine retracts at every twentieth step; a prompt of 700 tokens takes 17 MB before it is coded."""
    prompts = builtin_prompts(demo_model, count=3, num_tokens=700)
    server = start_server(
        artifact,
        CONFIG,
        *("--max-total-tokens", str(POOL), "--chunked-prefill-size", "512"),
        *("--kvtc-gates", str(gates), "--kvtc-keep", "0.3"),
        env={"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "20"},
    )
    answers: dict[int, list[int]] = {}

    def ask(index: int) -> None:
        answers[index] = server.generate(prompts[index], NEW_TOKENS).output_ids

    try:
        threads = [threading.Thread(target=ask, args=(index,)) for index in range(len(prompts))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        server.process.wait_encoded()
        eviction, tier = server.process.eviction_stats(), server.process.tier_stats()
        log = server.process.log()
    finally:
        server.process.stop()
    assert {index: len(answer) for index, answer in answers.items()} == dict.fromkeys(range(3), NEW_TOKENS)
    assert "etract" in log.split("server_args=")[-1].split("\n", 1)[1]
    assert eviction["unpublished_requests"] >= 1
    assert tier["frame_bytes"] + tier["staged_bytes"] <= ARENA
    assert (eviction["used_cells"], eviction["free_tokens"]) == (0, POOL)
    assert "Traceback" not in log.split("freeze_gc")[-1]
