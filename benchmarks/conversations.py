"""Conversations of two turns on a live server: a list of facts, a first question, then questions about the rest.

The list ends where a chunk of the prompt ends: text in front makes it so. A server with gates then evicts from the
list before it sees a question, as in `retrieval`. Each question of the second turn is a request of its own that sends
the whole first turn again, answer included, so that no answer helps another.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_kvtc.benchmarks.live_servers import Row, Setup, keep_lines, name_of
from sglang_kvtc.benchmarks.prompts import builtin_prompts
from sglang_kvtc.benchmarks.retrieval import Question, retrieval_tasks
from sglang_kvtc.calibrate.progress import Progress
from sglang_kvtc.cli.server_process import Generation, ServerError, ServerProcess

STALE = "stale_after_s = 0.2\nstale_min_usage = 0.0\n"
"""Lines of `[tier]`: prefixes leave the device as soon as the server is idle, so that every hit is a restored one."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """context_ids: what the first turn begins with, a whole number of chunks. questions: the first is asked in it."""

    context_ids: tuple[int, ...]
    questions: tuple[Question, ...]


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one conversation went.

    correct: a flag per question, those of the second turn after that of the first. hit_share: least share of the first
    turn's published tokens that a request of the second turn found; compressed: tokens of the hits that were restored.
    ttft_s: of the requests of the second turn.
    """

    correct: list[bool]
    hit_share: float
    compressed: int
    ttft_s: list[float]


def conversations(
    tokenizer: Any, model_dir: Path, *, count: int, num_lines: int, needles: int, chunk_tokens: int, seed: int
) -> list[Conversation]:
    """`count` conversations about lists of `num_lines` lines, of which `needles` are asked for.

    Raises ConfigError when the sizes cannot be.
    """
    tasks = retrieval_tasks(tokenizer, count, seed, num_lines, needles)
    # An empty line between the text in front and the list, as between documents.
    gap = tokenizer.encode("\n\n", add_special_tokens=False)
    texts = builtin_prompts(model_dir, count, chunk_tokens)
    return [
        Conversation(padded(task.context_ids, text, gap, chunk_tokens), task.questions)
        for task, text in zip(tasks, texts, strict=True)
    ]


def padded(list_ids: Sequence[int], text: Sequence[int], gap: Sequence[int], chunk_tokens: int) -> tuple[int, ...]:
    """The list with so much of `text` and `gap` in front that it ends where a chunk does.

    text: at least `chunk_tokens` tokens.
    """
    missing = -(len(list_ids) + len(gap)) % chunk_tokens
    return (*text[:missing], *gap, *list_ids)


def split_question(question: Question) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The tokens that ask, and those of the answer."""
    first = question.is_answer.index(True)
    return question.token_ids[:first], question.token_ids[first:]


def is_answered(output_ids: Sequence[int], question: Question) -> bool:
    """Whether all digits of the answer came, in its place."""
    _, answer = split_question(question)
    flags = question.is_answer[-len(answer) :]
    return len(output_ids) >= len(answer) and all(
        token == expected for token, expected, is_digit in zip(output_ids, answer, flags, strict=False) if is_digit
    )


def hold(server: ServerProcess, conversation: Conversation, *, has_tier: bool) -> Outcome:
    """Hold a conversation on a server that knows nothing of it.

    has_tier: wait between the turns until the first one is compressed and its slots are free.
    """
    server.flush()
    prompt, answer = _ask(server, conversation.context_ids, conversation.questions[0])
    published = prompt_published(prompt, answer)
    if has_tier:
        server.wait_compressed(published)
    correct = [is_answered(answer.output_ids, conversation.questions[0])]
    first_turn = (*prompt, *answer.output_ids)
    shares, ttfts, compressed = [], [], 0
    for question in conversation.questions[1:]:
        _, answer = _ask(server, first_turn, question)
        correct.append(is_answered(answer.output_ids, question))
        shares.append(min(1.0, (answer.cached_device + answer.cached_compressed) / published))
        compressed += answer.cached_compressed
        ttfts.append(answer.ttft_s)
    return Outcome(correct, min(shares), compressed, ttfts)


def prompt_published(prompt: Sequence[int], answer: Generation) -> int:
    """Tokens of a turn that can be found again: all but the last one, whose K and V were never computed."""
    return len(prompt) + len(answer.output_ids) - 1


def _ask(server: ServerProcess, context_ids: Sequence[int], question: Question) -> tuple[tuple[int, ...], Generation]:
    asking, expected = split_question(question)
    prompt = (*context_ids, *asking)
    return prompt, server.generate(prompt, len(expected), with_logprobs=False)


def measure_conversations(
    setup: Setup,
    held: Sequence[Conversation],
    keep: Sequence[float],
    artifact: Path,
    progress: Progress,
    *,
    window: int,
    ratio: float,
    pool_tokens: int,
) -> list[Row]:
    """The same conversations on stock, with the tier, with each share that stays, and with both."""

    def servers() -> Iterator[tuple[str, bool, AbstractContextManager[ServerProcess]]]:
        tier = f"[codec]\ntarget_ratio = {ratio}\n[tier]\n{STALE}"
        for share in (None, *keep):
            budget = "" if share is None else f"{keep_lines(share)}\nwindow_tokens = {window}"
            name = name_of(share)
            yield name, False, setup.server(pool_tokens, budget)
            yield f"{name} + tier", True, setup.server(pool_tokens, budget, config=tier, artifact=artifact)

    rows: list[Row] = []
    for name, has_tier, starting in servers():
        with starting as server, progress.stage(f"multi-turn, {name}", len(held), "conversations") as done:
            setup.warm_up(server)
            outcomes = []
            for conversation in held:
                outcomes.append(hold(server, conversation, has_tier=has_tier))
                done(1)
        rows.append(conversation_row(name, outcomes))
    full = rows[0]["correct"]
    if not isinstance(full, int) or not full:
        raise ServerError("the model answers no question with its whole cache: ask it about shorter lists")
    for row in rows:
        correct = row["correct"]
        assert isinstance(correct, int)
        row["correct_over_stock"] = correct / full
    return rows


def conversation_row(name: str, outcomes: Sequence[Outcome]) -> Row:
    """Sums over the conversations of one server; medians of times."""
    return {
        "part": "multi-turn",
        "server": name,
        "conversations": len(outcomes),
        "needles": sum(len(outcome.correct) for outcome in outcomes),
        "correct": sum(sum(outcome.correct) for outcome in outcomes),
        "correct_turn_one": sum(outcome.correct[0] for outcome in outcomes),
        "hit_share": min(outcome.hit_share for outcome in outcomes),
        "restored_tokens": sum(outcome.compressed for outcome in outcomes),
        "ttft_s": statistics.median(seconds for outcome in outcomes for seconds in outcome.ttft_s),
    }
