"""Generated tasks of the paper's kinds that a small model can do, asked about a context that was coded beforehand.

Each question is the next turn of a conversation: its tokens follow those of the context, and the cache of the context
was coded without knowing it. An answer counts when all of its tokens are the model's first choice one after the other,
which is when greedy decoding would give it.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sglang_kvtc.benchmarks.retrieval import WORDS, Question, RetrievalTask, is_right
from sglang_kvtc.calibrate.corpus import tokenize
from sglang_kvtc.calibrate.reading import first_choices
from sglang_kvtc.errors import ConfigError, UnsupportedError

QUESTIONS = 10
PASSKEY_DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)
_TRACED_EXAMPLES = 8
_FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
"""Of the passkey task of Mohtashami and Jaggi (2023)."""

Text = tuple[str, list[tuple[str, str]]]
"""A context and the questions about it: what is asked, and the answer that should follow."""


@dataclass(frozen=True, slots=True)
class TaskKind:
    """A kind of task. size: its default length, counted in `unit`. generate: draws one context of some size."""

    name: str
    size: int
    unit: str
    generate: Callable[[random.Random, int], Text]


def key_value_retrieval(generator: random.Random, num_pairs: int) -> Text:
    """Lost in the Middle (Liu et al. 2024): the value of a key of a JSON object. Keys are words and values digits,
    which a small model can copy. Raises ConfigError for more pairs than words.
    """
    if not 0 < num_pairs <= len(WORDS):
        raise ConfigError(f"{num_pairs} key-value pairs: expected 1 to {len(WORDS)}")
    keys = generator.sample(WORDS, num_pairs)
    pairs = [(key, f"{generator.randrange(1000):03d}") for key in keys]
    text = (
        "Extract the value corresponding to the specified key in the JSON object below.\n\nJSON data:\n{"
        + ",\n ".join(f'"{key}": "{value}"' for key, value in pairs)
        + "}"
    )
    asked = generator.sample(pairs, min(QUESTIONS, num_pairs))
    return text, [(f'\n\nExtracted:\n{{"{key}": "', value) for key, value in asked]


def variable_tracking(generator: random.Random, num_chains: int) -> Text:
    """Variables assigned to variables, in the manner of RULER (Hsieh et al. 2024): trace one back to its number.

    Every chain is a number, a variable and a second variable, with its lines apart from each other; a few traces stand
    at the end as examples. Raises ConfigError for more chains than words allow, or too few to ask about.
    """
    if not _TRACED_EXAMPLES < num_chains <= len(WORDS) // 2:
        raise ConfigError(f"{num_chains} chains: expected {_TRACED_EXAMPLES + 1} to {len(WORDS) // 2}")
    names = generator.sample(WORDS, 2 * num_chains)
    placed: list[tuple[float, str]] = []
    traces: list[tuple[str, str]] = []
    for source, target in zip(names[::2], names[1::2], strict=True):
        first, second = f"VAR {source} = {generator.randrange(1000):03d}", f"VAR {target} = {source}"
        placed += zip(sorted((generator.random(), generator.random())), (first, second), strict=True)
        traces.append((f"\n\nTrace of {target}:\nVAR {target} =", f" {source}\n{first}"))
    generator.shuffle(traces)
    examples = "".join(asking + answer for asking, answer in traces[:_TRACED_EXAMPLES])
    text = "\n".join(line for _, line in sorted(placed)) + examples
    return text, traces[_TRACED_EXAMPLES:][:QUESTIONS]


def passkey(generator: random.Random, num_sentences: int) -> Text:
    """One five-digit number for each of PASSKEY_DEPTHS, hidden in repeated filler (RULER's multi-key needles).

    The questions are in the order of the depths.
    """
    keys = generator.sample(WORDS, len(PASSKEY_DEPTHS))
    needles = [(key, f"{generator.randrange(100_000):05d}") for key in keys]
    lines = [_FILLER] * num_sentences
    for depth, (key, number) in reversed(list(zip(PASSKEY_DEPTHS, needles, strict=True))):
        lines.insert(int(depth * num_sentences), f"One of the special magic numbers for {key} is: {number}.")
    text = "Some special magic numbers are hidden within the following text. Make sure to memorize them.\n"
    asking = (
        "\nWhat is the special magic number for {key} mentioned in the text? "
        "The special magic number for {key} mentioned in the text is"
    )
    return text + "\n".join(lines), [(asking.format(key=key), f" {number}") for key, number in needles]


def arithmetic(generator: random.Random, num_examples: int) -> Text:
    """Sums of a number below 50 and a digit after worked examples."""

    def draw() -> tuple[str, str]:
        first, second = generator.randrange(10, 50), generator.randrange(1, 10)
        return f"{first} + {second} =", f" {first + second}"

    text = "\n".join("".join(draw()) for _ in range(num_examples))
    return text, [(f"\n{asking}", answer) for asking, answer in (draw() for _ in range(QUESTIONS))]


TASKS = {
    kind.name: kind
    for kind in (
        TaskKind("key-value", 100, "pairs", key_value_retrieval),
        TaskKind("variables", 24, "chains", variable_tracking),
        TaskKind("passkey", 32, "lines of filler", passkey),
        TaskKind("arithmetic", 32, "examples", arithmetic),
    )
}
"""The sizes are such that SmolLM2-135M answers half or more of each and not all; contexts have 300 to 1,000 tokens."""


def add_task_arguments(parser: argparse.ArgumentParser, names: Sequence[str], contexts: int) -> None:
    """Which tasks, of what size, in how many contexts."""
    parser.add_argument(
        "--tasks", type=comma_separated, default=tuple(names), help=f"of {','.join(TASKS)} (default {','.join(names)})"
    )
    parser.add_argument("--contexts", type=int, default=contexts, help="contexts of each task (default %(default)s)")
    for kind in TASKS.values():
        parser.add_argument(
            f"--{kind.name}-size", type=int, default=kind.size, help=f"{kind.unit} in {kind.name} (default %(default)s)"
        )


def comma_separated(text: str) -> tuple[str, ...]:
    """The value of a flag that takes names."""
    return tuple(name for name in text.split(",") if name)


def draw_tasks(args: argparse.Namespace, tokenizer: Any) -> dict[str, list[RetrievalTask]]:
    """The tasks that `add_task_arguments` and `args.seed` ask for, by name.

    Raises ConfigError for tasks there are not and sizes that cannot be.
    """
    if unknown := [name for name in args.tasks if name not in TASKS]:
        raise ConfigError(f"--tasks {','.join(unknown)}: expected some of {', '.join(TASKS)}")
    if args.contexts < 1:
        raise ConfigError(f"--contexts {args.contexts}: expected at least 1")
    drawn = {}
    for name in args.tasks:
        kind, size = TASKS[name], getattr(args, f"{name.replace('-', '_')}_size")
        if size < 1:
            raise ConfigError(f"--{name}-size {size}: expected at least 1")
        # A generator of its own, so that the same task is drawn whatever else is.
        generator = random.Random(f"{name} {args.seed}")
        drawn[name] = [_task(tokenizer, *kind.generate(generator, size)) for _ in range(args.contexts)]
    return drawn


def check_lengths(tasks: Mapping[str, Sequence[RetrievalTask]], raw_tokens: int) -> None:
    """Raise ConfigError where `raw_tokens` (sinks and window) leave nothing of a context to code."""
    for name, contexts in tasks.items():
        shortest = min(len(task.context_ids) for task in contexts)
        if shortest <= raw_tokens:
            raise ConfigError(
                f"--{name}-size gives contexts of {shortest} tokens, and {raw_tokens} stay raw: nothing is coded"
            )


def answered(model: Any, keys: torch.Tensor, values: torch.Tensor, task: RetrievalTask) -> list[bool]:
    """Which questions of a task are answered right on the cache of its context."""
    asked = [question.token_ids[:-1] for question in task.questions]
    choices = first_choices(model, keys, values, asked)
    return [is_right(question, chosen) for question, chosen in zip(task.questions, choices, strict=True)]


def _task(tokenizer: Any, text: str, questions: Sequence[tuple[str, str]]) -> RetrievalTask:
    asked = tuple(_question(tokenizer, asking, answer) for asking, answer in questions)
    return RetrievalTask(tuple(tokenize(text, tokenizer)), asked)


def _question(tokenizer: Any, asking: str, answer: str) -> Question:
    """Tokenised apart from the context, as a new turn is. Raises UnsupportedError where asking and answer join."""
    token_ids: list[int] = tokenizer.encode(asking + answer, add_special_tokens=False)
    asking_ids: list[int] = tokenizer.encode(asking, add_special_tokens=False)
    start = len(asking_ids)
    if token_ids[:start] != asking_ids:
        raise UnsupportedError(f"this tokenizer joins {asking[-8:]!r} and {answer[:8]!r}: the task cannot be asked")
    # A blank before the answer is no part of it.
    is_answer = [index >= start and bool(tokenizer.decode([token]).strip()) for index, token in enumerate(token_ids)]
    return Question(tuple(token_ids), tuple(is_answer))
