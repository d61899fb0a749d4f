"""The tier on a real server, lossless and coded, on both tree cores."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sglang_kvtc.cli.server_process import ServerError
from tests.engine.conftest import POOL_TOKENS, Server

pytestmark = pytest.mark.engine

PROMPT_TOKENS = 300
CONFIG = """
[codec]
target_ratio = {ratio}
[tier]
stale_after_s = 0.0
"""


LOSSLESS, CODED = ("lossless", "rust"), ("coded", "python")


@pytest.fixture(scope="module", params=[LOSSLESS, CODED], ids="-".join)
def server(
    request: pytest.FixtureRequest,
    start_server: Callable[..., Server],
    artifact: Path,
) -> Iterator[Server]:
    mode, tree_core = request.param
    # In fp32 the shape of a batch does not decide near-ties, so a restored answer must equal a recomputed one.
    flags, ratio = (("--dtype", "float32"), 1) if mode == "lossless" else ((), 16)
    started = start_server(artifact, CONFIG.format(ratio=ratio), *flags, tree_core=tree_core)
    assert f"Tree Core: {'Rust' if tree_core == 'rust' else ''}UnifiedTreeCore" in started.process.log()
    yield started
    # Not at the end of the module: an idle scheduler spins, and the next mode needs the cores.
    started.process.stop()


@pytest.fixture(autouse=True)
def clean(server: Server) -> None:
    server.set_faults("")
    server.process.flush()


def lossless(server: Server) -> bool:
    return "lossless" in server.process.log().split("kvtc: model", 1)[1].splitlines()[0]


def test_the_start_line_names_model_artifact_ratio_and_arena(server: Server) -> None:
    line = next(line for line in server.process.log().splitlines() if "kvtc: model" in line)
    assert "SmolLM2-135M-Instruct" in line and "bytes on the host" in line and "backend cpu" in line
    assert ("lossless" in line) != ("lossy, target ratio 16" in line)


def test_a_restored_prefix_answers_as_a_device_hit_or_a_recomputed_one(server: Server) -> None:
    prefix, extra = server.prompts[0][:PROMPT_TOKENS], server.prompts[9][5:6]
    server.generate(prefix)
    on_device = server.generate(prefix + extra)
    assert on_device.cached_device == PROMPT_TOKENS
    server.process.flush()
    recomputed = server.generate(prefix + extra)
    assert recomputed.cached_device == recomputed.cached_compressed == 0
    server.process.flush()
    server.generate(prefix)
    server.push_out(1)
    restored = server.generate(prefix + extra)
    assert (restored.cached_device, restored.cached_compressed) == (0, PROMPT_TOKENS)
    if lossless(server):
        assert restored.output_ids == on_device.output_ids == recomputed.output_ids
        assert restored.logprobs == on_device.logprobs


def test_a_num_08_a_restored_prefix_predicts_the_same_top_1_tokens(server: Server) -> None:
    count, length = (3, 64) if lossless(server) else (20, 24)
    prompts = [prompt[:PROMPT_TOKENS] for prompt in server.prompts[:count]]
    continuations = [prompt[PROMPT_TOKENS : PROMPT_TOKENS + length] for prompt in server.prompts[:count]]
    on_device = []
    for prompt, continuation in zip(prompts, continuations, strict=True):
        server.generate(prompt, max_new_tokens=1)
        on_device += server.process.predict(prompt, continuation).top1
    server.process.flush()
    for prompt in prompts:
        server.generate(prompt, max_new_tokens=1)
    server.push_out(count)
    restored = []
    for prompt, continuation in zip(prompts, continuations, strict=True):
        prediction = server.process.predict(prompt, continuation)
        assert prediction.cached_compressed > 0
        restored += prediction.top1
    equal = sum(a == b for a, b in zip(on_device, restored, strict=True))
    if lossless(server):
        assert equal == len(on_device)
    else:
        # The least of the paper's pipeline at ratio 16, 0.955 of all tokens, less three standard errors of 480.
        assert equal / len(on_device) >= 0.955 - 3 * (0.955 * 0.045 / len(on_device)) ** 0.5


def test_a_split_04_a_hit_may_end_inside_a_compressed_node(server: Server) -> None:
    whole, other = server.prompts[0][:PROMPT_TOKENS], server.prompts[9]
    server.generate(whole)
    server.push_out(1)
    forked = whole[:200] + other[:100]
    hit = server.generate(forked)
    assert (hit.cached_device, hit.cached_compressed) == (0, 200)
    rest = server.generate(whole + other[5:6])
    assert (rest.cached_device, rest.cached_compressed) == (200, PROMPT_TOKENS - 200)
    if lossless(server):
        server.process.flush()
        assert server.generate(forked).output_ids == hit.output_ids
        assert server.generate(whole + other[5:6]).output_ids == rest.output_ids


def test_a_hit_07_evicting_a_restored_prefix_again_codes_nothing_anew(server: Server) -> None:
    prefix, extra = server.prompts[0][:PROMPT_TOKENS], server.prompts[9][5:6]
    server.generate(prefix, max_new_tokens=1)
    for _round in range(2):  # after the second one, the fillers have been coded too
        server.push_out(1)
    first = server.generate(prefix + extra, max_new_tokens=8)
    before = server.process.wait_encoded()
    server.push_out(1)
    after = server.process.wait_encoded()
    again = server.generate(prefix + extra, max_new_tokens=8)
    assert again.cached_compressed >= PROMPT_TOKENS
    # Only the few tokens generated in between are new.
    assert after["encoded_tokens"] - before["encoded_tokens"] <= 64
    assert after["restored_prefixes"] > before["restored_prefixes"]
    assert again.output_ids == first.output_ids


def test_a_key_02_tenants_share_nothing(server: Server) -> None:
    prompt = server.prompts[0][:PROMPT_TOKENS]
    extra = server.prompts[9][5:6]
    server.generate(prompt, extra_key="tenant-a")
    server.push_out(1)
    foreign = server.generate(prompt + extra, extra_key="tenant-b")
    assert (foreign.cached_device, foreign.cached_compressed) == (0, 0)
    own = server.generate(prompt + extra, extra_key="tenant-a")
    assert own.cached_compressed == PROMPT_TOKENS


@pytest.mark.parametrize("server", [CODED], ids=["-".join(CODED)], indirect=True)
def test_a_sec_03_the_time_to_an_answer_does_not_tell_what_others_have_cached(server: Server) -> None:
    """30 guesses of a prefix that another tenant has cached, each beside a prefix that nobody has."""
    cached = server.prompts[0][:PROMPT_TOKENS]
    alphabet = sorted(set(cached))
    server.generate(cached, 1, extra_key="tenant-a")
    own, guessed, unseen = [], [], []
    for index in range(30):
        # A tenant's second guess would hit what its first one left.
        tenant = f"tenant-b{index}"
        nobodys = random.Random(index).choices(alphabet, k=PROMPT_TOKENS)
        probes = [(guessed, cached), (unseen, nobodys)]
        for times, prompt in probes if index % 2 else reversed(probes):
            answer = server.generate(prompt, 1, extra_key=tenant)
            assert (answer.cached_device, answer.cached_compressed) == (0, 0)
            times.append(answer.ttft_s)
        own.append(server.generate(cached, 1, extra_key="tenant-a").ttft_s)

    def faster(times: list[float]) -> int:
        return sum(time < other for time, other in zip(times, unseen, strict=True))

    # Sign tests: without a difference, counts beyond these have a probability of 6e-5.
    assert 5 <= faster(guessed) <= 25
    assert faster(own) > 25


def test_a_life_05_compression_frees_device_tokens_and_stores_far_fewer_bytes(server: Server) -> None:
    for prompt in server.prompts[:5]:
        server.generate(prompt[:PROMPT_TOKENS], max_new_tokens=1)
    stats = server.process.wait_encoded()
    stored_tokens = 5 * PROMPT_TOKENS - POOL_TOKENS
    assert stats["frame_tokens"] >= stored_tokens
    raw = stats["frame_tokens"] * stats["raw_bytes_per_token"]
    # By the plans, which entropy coding never exceeds: 4 of 300 tokens raw, 168 at ratio 16, 128 at ratio 8; and
    # header, table and checksum of three frames.
    planned = (4 + 168 / 16 + 128 / 8) * stats["raw_bytes_per_token"] + 3 * 100
    smallest = 1.0 if lossless(server) else PROMPT_TOKENS * stats["raw_bytes_per_token"] / planned
    assert raw / stats["frame_bytes"] > smallest


def test_a_ops_02_a_flush_empties_the_tier_even_while_chunks_wait_for_the_encoder(server: Server) -> None:
    server.set_faults("encode_delay_s=0.5")
    for prompt in server.prompts[:6]:
        server.generate(prompt[:PROMPT_TOKENS], max_new_tokens=1)
    assert server.process.tier_stats()["staged_chunks"] > 0
    server.process.flush()
    server.set_faults("")
    stats = server.process.wait_encoded()
    assert (stats["live_tokens"], stats["frame_bytes"], stats["staged_bytes"]) == (0, 0, 0)
    again = server.generate(server.prompts[0][:PROMPT_TOKENS])
    assert (again.cached_device, again.cached_compressed) == (0, 0)


def test_a_prefix_that_still_waits_for_the_encoder_is_restored_exactly(server: Server) -> None:
    prefix, extra = server.prompts[0][:PROMPT_TOKENS], server.prompts[9][5:6]
    server.generate(prefix)
    on_device = server.generate(prefix + extra)
    server.process.flush()
    server.generate(prefix)
    server.set_faults("encode_delay_s=3")
    for filler in server.prompts[1:4]:
        server.generate(filler, max_new_tokens=1)
    restored = server.generate(prefix + extra)
    server.set_faults("")
    assert restored.cached_compressed == PROMPT_TOKENS
    assert restored.logprobs == on_device.logprobs
    server.process.wait_encoded()


@pytest.mark.parametrize("byte", [0, 40, 70, 4000, -1])
def test_a_bit_09_a_damaged_frame_is_a_miss_and_the_tokens_are_recomputed(server: Server, byte: int) -> None:
    prefix, extra = server.prompts[0][:PROMPT_TOKENS], server.prompts[9][5:6]
    reference = server.generate(prefix + extra)
    server.process.flush()
    server.generate(prefix, max_new_tokens=1)
    server.push_out(1)
    before = server.process.tier_stats()
    server.set_faults(f"flip_byte={byte}")
    damaged = server.generate(prefix + extra)
    server.set_faults("")
    after = server.process.tier_stats()
    assert damaged.cached_compressed == 0
    assert damaged.output_ids == reference.output_ids
    assert after["rejected_frames"] > before["rejected_frames"]
    assert after["restored_prefixes"] == before["restored_prefixes"]


def test_a_hit_04_a_prefix_whose_frame_was_lost_is_hit_up_to_the_loss_only(server: Server) -> None:
    prefix, extra = server.prompts[0][:PROMPT_TOKENS], server.prompts[9][5:6]
    server.generate(prefix, max_new_tokens=1)
    server.push_out(1)
    server.set_faults("flip_byte=40")
    server.generate(prefix + extra)
    server.set_faults("")
    # The recomputed tokens are evicted in turn; the tree still thinks that they are backed up.
    server.push_out(1)
    again = server.generate(prefix + extra)
    assert again.cached_device + again.cached_compressed < PROMPT_TOKENS
    server.process.flush()
    if lossless(server):
        assert server.generate(prefix + extra).output_ids == again.output_ids


def test_a_leak_03_an_abort_during_a_restore_leaves_nothing_behind(server: Server) -> None:
    prefix, extra = server.prompts[0][:PROMPT_TOKENS], server.prompts[9][5:6]
    server.generate(prefix)
    server.push_out(1)
    server.set_faults("restore_delay_s=1.5")

    def request() -> None:
        try:
            server.process.generate(prefix + extra, 64, rid="to-abort")
        except ServerError:
            return

    client = threading.Thread(target=request)
    client.start()
    time.sleep(0.7)
    server.process.abort("to-abort")
    client.join(60)
    assert not client.is_alive()
    server.set_faults("")
    again = server.generate(prefix + extra)
    assert again.cached_device + again.cached_compressed >= PROMPT_TOKENS
    server.process.flush()
    assert server.process.tier_stats()["live_tokens"] == 0


def test_a_race_05_an_aborted_chunked_prefill_is_never_compressed_half_way(server: Server) -> None:
    prompt = server.prompts[0] + server.prompts[1]
    client = threading.Thread(target=lambda: _ignore(server.process.generate, prompt, 4, rid="chunked"))
    client.start()
    time.sleep(0.5)
    server.process.abort("chunked")
    client.join(60)
    server.push_out(2)
    reference = server.generate(prompt[:PROMPT_TOKENS])
    server.process.flush()
    assert server.generate(prompt[:PROMPT_TOKENS]).output_ids[:4] == reference.output_ids[:4]


def test_a_hit_05_a_batch_of_restored_and_cold_requests_answers_each_as_alone(server: Server) -> None:
    extra = server.prompts[9][5:6]
    prefixes = [prompt[:200] for prompt in server.prompts[:3]]
    for prefix in prefixes:
        server.generate(prefix, max_new_tokens=1)
    server.push_out(3)
    results: dict[int, int] = {}

    def request(index: int) -> None:
        prompt = prefixes[index] + extra if index < 3 else server.prompts[index + 3][:200]
        results[index] = server.process.generate(prompt, 8).cached_compressed

    clients = [threading.Thread(target=request, args=(index,)) for index in range(5)]
    for client in clients:
        client.start()
    for client in clients:
        client.join(120)
    assert [results[index] for index in range(5)] == [200, 200, 200, 0, 0]


def test_no_leak_was_reported_and_the_server_is_still_there(server: Server) -> None:
    server.process.flush()
    log = server.process.log()
    assert "leak" not in log.lower()
    assert "kvtc: a restore failed" not in log and "kvtc: encoding" not in log
    assert server.process.scheduler_state()["kvtc"]["live_tokens"] == 0


def _ignore(call: Callable[..., object], *args: object, **kwargs: object) -> None:
    try:
        call(*args, **kwargs)
    except ServerError:
        return
