"""`bench eviction` without a server: its log reading, its rows, its conversations, its upkeep and its refusals."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang_kvtc.artifact.schema import ModelFingerprint
from sglang_kvtc.benchmarks import conversations, live_servers
from sglang_kvtc.benchmarks.conversations import Conversation, conversation_row, hold, is_answered, padded
from sglang_kvtc.benchmarks.live_load import DecodeStep, Load, decode_steps, retracted_requests, send_together
from sglang_kvtc.benchmarks.retrieval import Question
from sglang_kvtc.benchmarks.routines import eviction as routine
from sglang_kvtc.cli.server_process import Generation, ServerError
from sglang_kvtc.errors import ConfigError
from sglang_kvtc.gates.io import GateFile
from sglang_kvtc.gates.model import GateConfig, GateInput, GateKind, new_gates
from sglang_kvtc.types import ModelGeometry

LOG = """\
[2025-11-30 04:50:01] Prefill batch, #new-seq: 1, #new-token: 512, #running-req: 2, #queue-req: 0
[2025-11-30 04:50:02] Decode batch, #running-req: 2, #token: 1230, token usage: 0.15, cuda graph: False, \
gen throughput (token/s): 40.00, #queue-req: 0
[2025-11-30 04:50:03] KV cache pool is full. Retract requests. #retracted_reqs: 1, #new_tokens_gained: 900
[2025-11-30 04:50:04] Decode batch, #running-req: 1, #token: 330, token usage: 0.04, cuda graph: False, \
gen throughput (token/s): 0.00, #queue-req: 1
"""
GEOMETRY = ModelGeometry(num_layers=2, num_kv_heads=2, head_dim=8, v_head_dim=8, dtype="bfloat16")


def answer(output_ids: list[int], arrivals_s: list[float] | None = None, device: int = 0, host: int = 0) -> Generation:
    return Generation(output_ids, [], 10, device, host, arrivals_s or [0.5] * len(output_ids))


class FakeServer:
    """Answers from a script and remembers what it was asked."""

    def __init__(self, answers: list[Generation], log: str = "") -> None:
        self.answers, self.written = answers, log
        self.asked: list[tuple[int, ...]] = []
        self.waits: list[int] = []
        self.flushes = 0

    def log(self) -> str:
        return self.written if self.asked else ""

    def generate(self, prompt: Any, new_tokens: int, *, with_logprobs: bool) -> Generation:
        assert not with_logprobs
        self.asked.append(tuple(prompt))
        return self.answers[len(self.asked) - 1]

    def flush(self) -> None:
        self.flushes += 1

    def wait_compressed(self, num_tokens: int) -> None:
        self.waits.append(num_tokens)


def gate_file() -> GateFile:
    config = GateConfig(GateKind.SINK_ATTENTION, GateInput.HIDDEN, 2, 16, 2, 2, gate_dim=4)
    return GateFile(new_gates(config, seed=0), ModelFingerprint("LlamaForCausalLM", "tiny", "0" * 32))


def test_the_log_says_how_many_decoded_in_how_much_memory_and_how_long_it_took() -> None:
    assert decode_steps(LOG) == [DecodeStep(2, 1230, 0.05), DecodeStep(1, 330, float("inf"))]
    assert retracted_requests(LOG) == 1


def test_a_load_is_measured_at_its_fullest() -> None:
    steps = [DecodeStep(1, 900, 0.01), DecodeStep(3, 600, 0.03), DecodeStep(3, 630, 0.05), DecodeStep(3, 610, 0.04)]
    load = Load([answer([1, 2, 3], [1.0, 1.1, 1.3]), answer([1, 2, 3], [2.0, 2.3, 2.7])], 4.0, steps, 0)
    assert (load.together, load.tokens_in_use) == (3, 630)
    assert load.ttft_s == 1.5
    assert load.token_latency_s == pytest.approx(0.25)
    assert load.output_tokens_per_s == 1.5
    assert load.step_s(3) == [0.03, 0.05, 0.04]
    with pytest.raises(ServerError, match="no decode step had 2 requests, the most were 3"):
        load.step_s(2)


def test_requests_that_are_answered_short_fail_the_run() -> None:
    load = send_together(FakeServer([answer([1, 2])], LOG), [[5, 6]], 2)  # type: ignore[arg-type]
    assert (load.together, load.retracted) == (2, 1)
    with pytest.raises(ServerError, match="1 of 1 answers are shorter than 3 tokens"):
        send_together(FakeServer([answer([1, 2])], LOG), [[5, 6]], 3)  # type: ignore[arg-type]


def test_more_requests_count_less_where_tables_took_memory() -> None:
    load = Load([answer([1, 2])] * 6, 4.0, [DecodeStep(2, 4000, 0.1)], 0)
    stock = live_servers.load_row(load, "stock", 2000) | {"kv_bytes": 1000, "table_bytes": 0, "buffer_bytes": 0}
    more = Load([answer([1, 2])] * 6, 2.0, [DecodeStep(6, 3600, 0.1)], 0)
    gated = live_servers.load_row(more, "keep 0.3", 2000) | {"kv_bytes": 1000, "table_bytes": 150, "buffer_bytes": 50}
    rows = live_servers.compare_concurrency([stock, gated])
    assert [row["together_over_stock"] for row in rows] == [1, 3]
    assert [row["at_equal_memory"] for row in rows] == [1, 2.5]
    assert [row["throughput_over_stock"] for row in rows] == [1, 2]
    assert [row["in_use_per_prompt_token"] for row in rows] == [1, 0.3]


def test_upkeep_is_a_share_of_the_step_it_is_in() -> None:
    steps_s = {("stock", 8): 0.04, ("keep 1", 8): 0.05}
    rows = live_servers.overhead_rows(steps_s, {("keep 1", 8): {"tables_ms": 0.7, "evict_ms": 0.3}}, 1000)
    assert [row["step_over_stock"] for row in rows] == [1, 1.25]
    assert "upkeep_ms" not in rows[0]
    assert (rows[1]["upkeep_ms"], rows[1]["upkeep_share"]) == (1, pytest.approx(0.02))
    assert (rows[1]["tables_ms"], rows[1]["evict_ms"]) == (0.7, 0.3)


def test_buffered_hidden_states_are_counted() -> None:
    assert live_servers.buffer_bytes(gate_file(), GEOMETRY) == 128 * 2 * 16 * 2


def test_a_long_answer_is_told_in_quarters(tmp_path: Path) -> None:
    arrivals = [0.1 * index for index in range(20)]
    steps = [DecodeStep(1, 10 + index, 0.1) for index in range(19)]
    load = Load([answer(list(range(20)), arrivals)], 2.0, steps, 0)
    rows = live_servers.generation_rows(load, "stock", 10)
    assert [row["new_tokens"] for row in rows] == [5, 10, 15, 20]
    assert [row["most_tokens_in_use"] for row in rows] == [14, 19, 24, 28]
    assert [row["ms_per_token"] for row in rows] == pytest.approx([100] * 4)
    live_servers.plot_generation({"stock": steps}, tmp_path / "memory.png")
    assert (tmp_path / "memory.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


QUESTION = Question((7, 8, 21, 22, 23), (False, False, True, True, True))
OTHER = Question((7, 9, 31, 32), (False, False, True, True))


def test_a_list_ends_where_a_chunk_ends() -> None:
    text = list(range(100, 200))
    assert padded([1, 2, 3], text, [0], 8) == (100, 101, 102, 103, 0, 1, 2, 3)
    assert padded([1] * 7, text, [0], 8) == (0, *[1] * 7)
    assert len(padded([1] * 8, text, [0], 8)) == 16


def test_an_answer_is_right_when_all_its_digits_are() -> None:
    assert conversations.split_question(QUESTION) == ((7, 8), (21, 22, 23))
    assert is_answered([21, 22, 23], QUESTION)
    assert not is_answered([21, 22], QUESTION)
    assert not is_answered([21, 22, 24], QUESTION)


@pytest.mark.parametrize("has_tier", [False, True])
def test_every_question_of_turn_two_sends_turn_one_again(has_tier: bool) -> None:
    server = FakeServer([answer([21, 22, 23]), answer([31, 32], host=13), answer([31, 40], device=3, host=4)])
    conversation = Conversation((1, 2, 3, 4, 5, 6), (QUESTION, OTHER, OTHER))
    outcome = hold(server, conversation, has_tier=has_tier)  # type: ignore[arg-type]
    first = (1, 2, 3, 4, 5, 6, 7, 8)
    assert server.asked == [first, *[(*first, 21, 22, 23, 7, 9)] * 2]
    # The last token of an answer has no KV.
    assert server.waits == ([10] if has_tier else [])
    assert outcome.correct == [True, True, False]
    assert (outcome.hit_share, outcome.compressed) == (0.7, 17)
    row = conversation_row("tier", [outcome, outcome])
    assert (row["needles"], row["correct"], row["correct_turn_one"]) == (6, 4, 2)
    assert (row["hit_share"], row["restored_tokens"], row["ttft_s"]) == (0.7, 34, 0.5)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("keep_fraction", [1.0, 0.3])
def test_upkeep_makes_the_calls_of_a_server(keep_fraction: float) -> None:
    from sglang_kvtc.benchmarks.upkeep import INTERVALS, Upkeep

    with torch.inference_mode():
        upkeep = Upkeep(gate_file(), GEOMETRY, keep_fraction, 3, 600, other_bytes=4)
        measured = upkeep.measure()
    assert list(measured) == ["allocate_ms", "tables_ms", "states_ms", "evict_ms"]
    assert all(milliseconds > 0 for milliseconds in measured.values())
    stats = upkeep.gating.stats()
    assert stats["gated_requests"] == 3
    whole = 3 * (600 + 128 * INTERVALS) * 4
    if keep_fraction == 1:
        assert (stats["evictions"], stats["used_cells"]) == (0, whole)
    else:
        assert stats["evictions"] == 3 * (1 + INTERVALS)
        assert 0.28 * whole < stats["used_cells"] <= 0.3 * whole


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--parts", "overhead,tables"), "--parts tables: expected some of concurrency, overhead"),
        (("--keep", "0.5,1.5"), "--keep 1.5: expected shares above 0"),
        (("--plot", "memory.pdf"), "--plot memory.pdf: expected a file name that ends in .png"),
        (("--plot", "memory.png", "--parts", "overhead"), "only the part generation has a picture"),
        (("--pool-tokens", "2048"), "--pool-tokens 2048: expected more than the 2000 \\+ 48"),
        (("--needles", "1"), "--needles 1: expected at least 2"),
        (("--steps", "0"), "--steps 0: expected at least 1"),
    ],
)
def test_what_cannot_work_is_refused_before_a_server_starts(flags: tuple[str, ...], message: str) -> None:
    parser = argparse.ArgumentParser()
    routine.add_arguments(parser)
    with pytest.raises(ConfigError, match=message):
        routine.run(parser.parse_args(flags))
