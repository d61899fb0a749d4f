"""Gated eviction inside running requests on a real server, against the stock server and a masked dense model."""

from __future__ import annotations

import itertools
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sglang_kvtc.benchmarks.prompts import builtin_prompts
from sglang_kvtc.calibrate.causal_lm import load_model
from sglang_kvtc.cli.server_process import Generation
from tests.engine.conftest import Server
from tests.engine.masked_dense import Evictions, log_probs

pytestmark = pytest.mark.engine

FP32 = ("--dtype", "float32")
POOL = 6000
KEEP = 0.3
LENGTHS = (1, 2, 17, 300, 1500, 4000)
"""Of prompts; the servers compute up to 1,024 tokens in one chunk."""
NEW_TOKENS = 16
WHOLE = {"kvtc_gated": False}


@pytest.fixture(scope="module")
def long_prompts(demo_model: Path) -> list[list[int]]:
    return builtin_prompts(demo_model, count=12, num_tokens=2000)


@pytest.fixture(scope="module")
def prompt_of(long_prompts: list[list[int]]) -> dict[int, list[int]]:
    joined = list(itertools.chain.from_iterable(long_prompts))
    return {length: joined[start : start + length] for start, length in zip(range(7, 700, 101), LENGTHS, strict=False)}


def together(server: Server, prompts: Sequence[Sequence[int]], new_tokens: int, **options: Any) -> list[Generation]:
    answers: list[Generation | None] = [None] * len(prompts)

    def ask(index: int) -> None:
        answers[index] = server.process.generate(prompts[index], new_tokens, **options)

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert None not in answers
    return [answer for answer in answers if answer is not None]


def answers_of(server: Server, prompts: dict[int, list[int]]) -> dict[str, Generation]:
    """Every prompt alone, and all but the longest in one batch."""
    answers = {f"{length} alone": server.generate(prompt, NEW_TOKENS) for length, prompt in prompts.items()}
    server.process.flush()
    batch = [prompts[length] for length in LENGTHS[:-1]]
    for length, answer in zip(LENGTHS, together(server, batch, NEW_TOKENS), strict=False):
        answers[f"{length} in a batch"] = answer
    return answers


@pytest.fixture(scope="module")
def stock_answers(start_server: Callable[..., Server], prompt_of: dict[int, list[int]]) -> dict[str, Generation]:
    server = start_server(None, "", *FP32, "--max-total-tokens", str(POOL), "--chunked-prefill-size", "1024")
    assert "kvtc_eviction" not in server.process.scheduler_state()
    answers = answers_of(server, prompt_of)
    server.process.stop()
    return answers


def test_keeping_everything_answers_as_stock_token_for_token(
    start_server: Callable[..., Server],
    gates: Path,
    stock_answers: dict[str, Generation],
    prompt_of: dict[int, list[int]],
    tmp_path: Path,
) -> None:
    server = start_server(
        None,
        "",
        *(*FP32, "--max-total-tokens", str(POOL), "--chunked-prefill-size", "1024"),
        *("--kvtc-gates", str(gates), "--kvtc-keep", "1.0"),
        env={"KVTC_MASKS": str(tmp_path)},
    )
    try:
        answers = answers_of(server, prompt_of)
        stats = server.process.eviction_stats()
    finally:
        server.process.stop()
    assert {name: answer.output_ids for name, answer in answers.items()} == {
        name: answer.output_ids for name, answer in stock_answers.items()
    }
    assert stats["evictions"] == 0 and stats["gated_requests"] >= len(answers)
    assert stats["used_cells"] == 0 and stats["free_tokens"] == POOL


@pytest.fixture(scope="module")
def masks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("masks")


@pytest.fixture(scope="module")
def server(start_server: Callable[..., Server], gates: Path, masks: Path) -> Iterator[Server]:
    started = start_server(
        None,
        "",
        *(*FP32, "--max-total-tokens", str(POOL), "--chunked-prefill-size", "512", "--max-running-requests", "16"),
        *("--kvtc-gates", str(gates), "--kvtc-keep", str(KEEP), "--decode-log-interval", "1"),
        env={"KVTC_MASKS": str(masks)},
    )
    yield started
    started.process.stop()


@pytest.fixture(autouse=True)
def nothing_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """After every test: all memory is free, and the server's own checks found nothing."""
    yield
    if "server" not in request.fixturenames:
        return
    server: Server = request.getfixturevalue("server")
    server.process.flush()
    stats = server.process.eviction_stats()
    assert (stats["used_cells"], stats["free_tokens"]) == (0, POOL)
    log = server.process.log().lower()
    assert "leak" not in log.replace("memory_leak", "") and "traceback" not in log.split("freeze_gc")[-1]


def evictions_of(masks: Path, rid: str) -> Evictions:
    found = {int(path.name.split(".")[-2]): path for path in masks.glob(f"{rid}.*.npy")}
    return [(length, torch.from_numpy(np.load(found[length]))) for length in sorted(found)]


def test_b_ev_02_03_06_17_logits_are_those_of_a_masked_dense_model_with_original_positions(
    server: Server, masks: Path, demo_model: Path, long_prompts: list[list[int]]
) -> None:
    """Two chunks, then 200 tokens with an eviction among them; cells without a pair hold NaN."""
    prompt = long_prompts[0][:900]
    answer = server.process.generate(prompt, 200, rid="masked")
    evictions = evictions_of(masks, "masked")
    assert [length for length, _ in evictions] == [512, 900, 900 + 128]
    for length, left in evictions:
        assert left.sum() == int(KEEP * left.numel()), length
        kept_by_head = left.sum(dim=1)
        assert kept_by_head.min() < kept_by_head.max()

    text = [*prompt, *answer.output_ids]
    tokens = torch.tensor(answer.output_ids)

    def answered(dtype: torch.dtype) -> torch.Tensor:
        model = load_model(demo_model, "float32").to(dtype)
        expected = log_probs(model, text[:-1], evictions)[len(prompt) - 1 :]
        return expected.gather(1, tokens[:, None])[:, 0]

    exact, rounded = answered(torch.float64), answered(torch.float32)
    error = (torch.tensor(answer.logprobs, dtype=torch.float64) - exact).abs().max()
    assert error <= 2 * (rounded - exact).abs().max()
    # Not because nothing was evicted: the whole cache would answer otherwise.
    whole = log_probs(load_model(demo_model, "float32"), text[:-1], [])[len(prompt) - 1 :]
    assert (whole.gather(1, tokens[:, None])[:, 0] - exact).abs().max() > 100 * error


def test_a_request_can_opt_out_and_answers_as_stock(
    server: Server, stock_answers: dict[str, Generation], prompt_of: dict[int, list[int]]
) -> None:
    before = server.process.eviction_stats()
    answer = server.process.generate(prompt_of[1500], NEW_TOKENS, custom_params=WHOLE)
    after = server.process.eviction_stats()
    assert answer.output_ids == stock_answers["1500 alone"].output_ids
    assert after["gated_requests"] == before["gated_requests"] and after["evictions"] == before["evictions"]


def test_without_a_tier_a_gated_request_publishes_nothing_and_never_meets_a_whole_one(
    server: Server, long_prompts: list[list[int]]
) -> None:
    prompt = long_prompts[1][:600]
    server.generate(prompt)
    assert server.generate(prompt).cached_device == 0
    server.process.generate(prompt, 4, custom_params=WHOLE)
    assert server.process.generate([*prompt, 5], 4, custom_params=WHOLE).cached_device == 600
    assert server.generate([*prompt, 5]).cached_device == 0


def test_b_ev_04_a_fresh_prompt_and_a_continuing_one_answer_as_alone(
    server: Server, masks: Path, long_prompts: list[list[int]]
) -> None:
    """Both are in one batch: the second chunk of one prompt over its evicted first one, and all of another."""
    prompts = {"continuing": long_prompts[2][:612], "fresh": long_prompts[3][:412]}
    alone = {name: server.process.generate(prompt, 40, rid=f"{name}-alone") for name, prompt in prompts.items()}
    batch: dict[str, Generation] = {}

    def ask(name: str) -> None:
        batch[name] = server.process.generate(prompts[name], 40, rid=f"{name}-both")

    threads = [threading.Thread(target=ask, args=(name,)) for name in prompts]
    seen_from = len(server.process.log())
    for thread in threads:
        thread.start()
        time.sleep(0.2)
    for thread in threads:
        thread.join()
    assert "#new-seq: 1, #new-token: 512" in server.process.log()[seen_from:]
    assert "#new-seq: 2, #new-token: 512" in server.process.log()[seen_from:]
    for name in prompts:
        assert batch[name].output_ids == alone[name].output_ids
        evicted_alone, evicted = evictions_of(masks, f"{name}-alone"), evictions_of(masks, f"{name}-both")
        assert [length for length, _ in evicted] == [length for length, _ in evicted_alone]


def test_b_ev_07_memory_is_freed_and_more_requests_decode_together(
    server: Server, long_prompts: list[list[int]]
) -> None:
    """Stock has room for two prompts of 2,000 tokens and their answers; here seven run, without retraction."""
    seen_from = len(server.process.log())
    answers = together(server, long_prompts[:7], 40)
    assert all(len(answer.output_ids) == 40 for answer in answers)
    log = server.process.log()[seen_from:]
    running = [(int(count), int(tokens)) for count, tokens in re.findall(r"#running-req: (\d+), #token: (\d+)", log)]
    assert max(count for count, _ in running) >= 7
    at_most = max(tokens for count, tokens in running if count == 7)
    assert at_most <= 0.36 * 7 * 2000
    assert "Retract" not in log and "retract" not in log


def test_b_ev_18_more_than_fits_waits_its_turn(server: Server, long_prompts: list[list[int]]) -> None:
    answers = together(server, long_prompts[:9], 8)
    assert all(len(answer.output_ids) == 8 for answer in answers)


def test_an_aborted_request_gives_everything_back(server: Server, long_prompts: list[list[int]]) -> None:
    for wait_s in (0.3, 3.0, 8.0):
        thread = threading.Thread(target=_swallow, args=(server, long_prompts[5], f"abort-{wait_s}"))
        thread.start()
        time.sleep(wait_s)
        server.process.abort(f"abort-{wait_s}")
        thread.join()
    assert len(server.generate(long_prompts[5][:100], 4).output_ids) == 4


def _swallow(server: Server, prompt: Sequence[int], rid: str) -> None:
    try:
        server.process.generate(prompt, 400, rid=rid)
    except Exception as error:
        assert "abort" in str(error).lower() or "sent no tokens" in str(error)
