"""Requests sent to a live server at once, and what its log says of every decode step they took."""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from sglang_kvtc.cli.server_process import Generation, ServerError, ServerProcess

LOG_EVERY_STEP = ("--decode-log-interval", "1")
"""Flags of a server whose log `decode_steps` reads."""

_DECODE = re.compile(
    r"Decode batch.*?#running-req: (?P<running>\d+), #token: (?P<tokens>\d+),"
    r".*?gen throughput \(token/s\): (?P<throughput>[\d.]+)"
)
_RETRACTION = re.compile(r"#retracted_reqs: (\d+)")


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """One decode step as the server logs it.

    running: requests of the batch. tokens: memory in use, in whole tokens. seconds: since the decode step before, so
    that prompts computed in between are in it; infinite where the log rounds the throughput to 0.
    """

    running: int
    tokens: int
    seconds: float


def decode_steps(log: str) -> list[DecodeStep]:
    """Every decode step in a log of a server with LOG_EVERY_STEP."""
    steps = []
    for found in _DECODE.finditer(log):
        running, throughput = int(found["running"]), float(found["throughput"])
        steps.append(DecodeStep(running, int(found["tokens"]), running / throughput if throughput else float("inf")))
    return steps


def retracted_requests(log: str) -> int:
    """How many running requests SGLang stopped for want of memory."""
    return sum(int(count) for count in _RETRACTION.findall(log))


@dataclass(frozen=True, slots=True)
class Load:
    """What came of requests that were sent at once.

    wall_s: seconds until the last was answered. steps: the decode steps of that time. retracted: requests stopped for
    want of memory, counted each time.
    """

    answers: list[Generation]
    wall_s: float
    steps: list[DecodeStep]
    retracted: int

    @property
    def together(self) -> int:
        """Most requests that decoded in one step."""
        return max(step.running for step in self.steps)

    @property
    def tokens_in_use(self) -> int:
        """Most memory in use while so many decoded, in whole tokens."""
        return max(step.tokens for step in self.steps if step.running == self.together)

    @property
    def ttft_s(self) -> float:
        """Median of all requests, the time in the queue included."""
        return statistics.median(answer.ttft_s for answer in self.answers)

    @property
    def token_latency_s(self) -> float:
        """Median time between two tokens of a request."""
        return statistics.median(
            later - earlier
            for answer in self.answers
            for earlier, later in zip(answer.arrivals_s, answer.arrivals_s[1:], strict=False)
        )

    @property
    def output_tokens_per_s(self) -> float:
        """Over the whole time, prompts included."""
        return sum(len(answer.output_ids) for answer in self.answers) / self.wall_s

    def step_s(self, running: int) -> list[float]:
        """Times of the decode steps of that many requests. Raises ServerError if there were none."""
        seconds = [step.seconds for step in self.steps if step.running == running]
        if not seconds:
            raise ServerError(f"no decode step had {running} requests, the most were {self.together}")
        return seconds


def send_together(server: ServerProcess, prompts: Sequence[Sequence[int]], new_tokens: int) -> Load:
    """Send every prompt at once and wait for `new_tokens` tokens of each.

    server: started with LOG_EVERY_STEP. Raises ServerError if a request fails or its answer is shorter.
    """
    seen = len(server.log())
    started = time.perf_counter()

    def ask(prompt: Sequence[int]) -> Generation:
        return server.generate(prompt, new_tokens, with_logprobs=False)

    with ThreadPoolExecutor(len(prompts)) as threads:
        answers = list(threads.map(ask, prompts))
    wall_s = time.perf_counter() - started
    if short := sum(len(answer.output_ids) < new_tokens for answer in answers):
        raise ServerError(f"{short} of {len(answers)} answers are shorter than {new_tokens} tokens")
    log = server.log()[seen:]
    return Load(answers, wall_s, decode_steps(log), retracted_requests(log))
