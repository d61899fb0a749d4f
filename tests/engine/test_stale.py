"""Compression of stale prefixes while the server idles."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.engine.conftest import Server

pytestmark = pytest.mark.engine

CONFIG = """
[codec]
target_ratio = 1
[tier]
stale_after_s = 1.0
stale_min_usage = 0.0
"""


@pytest.fixture(scope="module")
def server(start_server: Callable[..., Server], artifact: Path) -> Server:
    return start_server(artifact, CONFIG, "--dtype", "float32", tree_core="rust")


def wait_until_compressed(server: Server, tokens: int) -> dict[str, float]:
    deadline = time.monotonic() + 60
    while (stats := server.process.wait_encoded())["live_tokens"] < tokens:
        assert time.monotonic() < deadline, stats
        time.sleep(0.2)
    return stats


def test_an_idle_server_compresses_what_nobody_touched(server: Server) -> None:
    prefix, extra = server.prompts[0][:300], server.prompts[9][5:6]
    server.generate(prefix)
    on_device = server.generate(prefix + extra)
    assert on_device.cached_device == 300
    wait_until_compressed(server, 300)
    restored = server.generate(prefix + extra)
    assert (restored.cached_device, restored.cached_compressed) == (0, 300)
    assert restored.logprobs == on_device.logprobs


def test_a_prefix_in_use_is_not_compressed(server: Server) -> None:
    server.process.flush()
    prefix = server.prompts[1][:400]
    deadline = time.monotonic() + 4
    server.generate(prefix, max_new_tokens=1)
    while time.monotonic() < deadline:
        hit = server.generate(prefix + server.prompts[9][5:6], max_new_tokens=1)
        assert hit.cached_device == 400
        time.sleep(0.2)


def test_turns_of_a_conversation_come_back_from_the_tier(server: Server) -> None:
    server.process.flush()
    prompt = server.prompts[2][:300]
    for _turn in range(3):
        answer = server.generate(prompt)
        prompt = prompt + answer.output_ids + server.prompts[9][100:150]
        # The last generated token has no KV yet.
        wait_until_compressed(server, len(prompt) - 51)
    final = server.generate(prompt)
    assert final.cached_compressed == len(prompt) - 51
    server.process.flush()
    assert server.generate(prompt).output_ids == final.output_ids


def test_no_leak_was_reported(server: Server) -> None:
    server.process.flush()
    assert "leak" not in server.process.log().lower()
