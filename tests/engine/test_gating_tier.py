"""Gated eviction together with the compressed tier: a live request runs light, the tree keeps its whole prefix."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sglang_kvtc.benchmarks.prompts import builtin_prompts
from sglang_kvtc.cli.server_process import ServerError
from tests.engine.conftest import Server

pytestmark = pytest.mark.engine

POOL = 2600
PROMPT = 700
"""Tokens, computed in one chunk of 1,024."""
CONFIG = """
[codec]
target_ratio = 16
[tier]
stale_after_s = 0.0
"""
WHOLE = {"kvtc_gated": False}
CONTINUATION = 96


@pytest.fixture(scope="module")
def prompts(demo_model: Path) -> list[list[int]]:
    return builtin_prompts(demo_model, count=10, num_tokens=PROMPT + CONTINUATION)


def flags(*more: str) -> tuple[str, ...]:
    return ("--max-total-tokens", str(POOL), "--chunked-prefill-size", "1024", *more)


@pytest.fixture(scope="module")
def predicted_by_the_tier_alone(
    start_server: Callable[..., Server], artifact: Path, prompts: list[list[int]]
) -> list[list[int]]:
    """Top-1 tokens after restored prompts, teacher-forced, of a server without gates."""
    server = start_server(artifact, CONFIG, *flags())
    answers = []
    for prompt in prompts[:3]:
        server.generate(prompt[:PROMPT], 2)
    for filler in prompts[4:8]:
        server.generate(filler, 1)
    server.process.wait_encoded()
    for prompt in prompts[:3]:
        prediction = server.process.predict(prompt[:PROMPT], prompt[PROMPT:])
        assert prediction.cached_compressed == PROMPT - 1
        answers.append(prediction.top1)
    server.process.stop()
    return answers


on_both_cores = pytest.mark.parametrize("server", ["rust", "python"], indirect=True)
on_one_core = pytest.mark.parametrize("server", ["rust"], indirect=True)


@pytest.fixture(scope="module")
def server(
    request: pytest.FixtureRequest, start_server: Callable[..., Server], artifact: Path, gates: Path
) -> Iterator[Server]:
    started = start_server(
        artifact,
        CONFIG,
        *flags("--kvtc-gates", str(gates), "--kvtc-keep", "0.3"),
        tree_core=request.param,
    )
    yield started
    started.process.stop()


@pytest.fixture(autouse=True)
def nothing_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every test begins empty, and after it everything is free again and nothing is stored."""
    if "server" not in request.fixturenames:
        yield
        return
    server: Server = request.getfixturevalue("server")
    server.set_faults("")
    server.process.flush()
    yield
    server.set_faults("")
    server.process.wait_encoded()
    server.process.flush()
    eviction, tier = server.process.eviction_stats(), server.process.tier_stats()
    assert (eviction["used_cells"], eviction["free_tokens"]) == (0, POOL)
    assert (tier["live_tokens"], tier["frame_bytes"], tier["staged_bytes"]) == (0, 0, 0)


@on_both_cores
def test_b_ev_20_turn_two_hits_all_that_turn_one_published(server: Server, prompts: list[list[int]]) -> None:
    """Everything but the last token, whose KV was never computed; over three turns and a decode eviction."""
    text, earlier = prompts[0][:PROMPT], list[int]()
    for new_tokens in (20, 150, 8):
        before = server.process.eviction_stats()
        answer = server.generate(text, new_tokens)
        after = server.process.eviction_stats()
        published = max(0, len(earlier) - 1)
        assert (answer.cached_device, answer.cached_compressed) == (0, published)
        assert after["restored_tokens"] - before["restored_tokens"] == published
        assert after["evictions"] > before["evictions"]
        assert after["used_cells"] == 0
        earlier = text + answer.output_ids
        text = earlier + prompts[1][:40]
    assert server.process.wait_encoded()["live_tokens"] == len(earlier) - 1


@on_one_core
def test_restored_prompts_predict_what_the_tier_alone_predicts(
    server: Server, prompts: list[list[int]], predicted_by_the_tier_alone: list[list[int]]
) -> None:
    agreed = total = 0
    for prompt, expected in zip(prompts, predicted_by_the_tier_alone, strict=False):
        server.generate(prompt[:PROMPT], 2)
        server.process.wait_encoded()
        prediction = server.process.predict(prompt[:PROMPT], prompt[PROMPT:])
        assert prediction.cached_compressed == PROMPT - 1
        agreed += sum(found == wanted for found, wanted in zip(prediction.top1, expected, strict=True))
        total += len(expected)
    assert total == 3 * CONTINUATION and agreed >= 0.95 * total


@on_both_cores
def test_b_ev_05_neither_kind_of_request_is_served_what_the_other_published(
    server: Server, prompts: list[list[int]]
) -> None:
    prompt = prompts[2][:PROMPT]
    fresh = server.process.generate([*prompt, 5], 8, custom_params=WHOLE)
    server.process.flush()
    server.generate(prompt, 2)
    server.process.wait_encoded()
    whole = server.process.generate([*prompt, 5], 8, custom_params=WHOLE)
    assert (whole.cached_device, whole.cached_compressed) == (0, 0)
    assert whole.output_ids == fresh.output_ids and whole.logprobs == fresh.logprobs
    gated = server.generate([*prompt, 5], 8)
    assert (gated.cached_device, gated.cached_compressed) == (0, PROMPT + 1 - 1)
    again = server.process.generate([*prompt, 5], 8, custom_params=WHOLE)
    assert again.cached_device == PROMPT


@on_one_core
def test_b_ev_05_requests_that_share_a_stored_prefix_do_not_change_one_another(
    server: Server, prompts: list[list[int]]
) -> None:
    """Each gets the prefix as its own and evicts from it, while the tree's frames stay as they are."""
    prefix = prompts[3][:PROMPT]
    server.generate(prefix, 2)
    stored = server.process.wait_encoded()["live_tokens"]
    alone = server.generate([*prefix, 7], 40)
    assert alone.cached_compressed == PROMPT

    answers = {}

    def ask(token: int, new_tokens: int) -> None:
        answers[token] = server.generate([*prefix, token], new_tokens)

    threads = [threading.Thread(target=ask, args=of) for of in ((9, 140), (11, 140))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(answer.cached_compressed == PROMPT for answer in answers.values())
    assert server.process.wait_encoded()["live_tokens"] > stored
    after = server.generate([*prefix, 7], 40)
    # What `alone` published is hit as well: it answered the same text.
    assert after.output_ids[:8] == alone.output_ids[:8]


@on_one_core
def test_a_damaged_frame_is_a_miss_for_a_gated_request(server: Server, prompts: list[list[int]]) -> None:
    prompt = prompts[4][:PROMPT]
    fresh = server.generate(prompt, 8)
    server.process.wait_encoded()
    server.set_faults("flip_byte=200")
    answer = server.generate(prompt, 8)
    assert answer.cached_compressed == 0
    assert answer.output_ids == fresh.output_ids


@on_one_core
def test_an_aborted_request_leaves_nothing_stored_twice(server: Server, prompts: list[list[int]]) -> None:
    def ask() -> None:
        try:
            server.process.generate(prompts[5][:PROMPT], 1200, rid="aborted")
        except ServerError as error:
            assert "abort" in str(error).lower()

    thread = threading.Thread(target=ask)
    thread.start()
    time.sleep(6)
    server.process.abort("aborted")
    thread.join()
    stored = server.process.wait_encoded()["live_tokens"]
    hit = server.generate(prompts[5][:PROMPT], 2).cached_compressed
    assert hit in (0, PROMPT - 1) and stored >= hit
