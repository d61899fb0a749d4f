"""Multi-query retrieval: a list of words with numbers, compressed once, of which several are asked one by one.

Unlike the KL on a document's next lines it needs pairs from all over the context, so it separates methods that keep
what is recent from those that keep what carries information. The questions are unknown when the context is compressed.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sglang_kvtc.benchmarks.eviction import Respond
from sglang_kvtc.calibrate.corpus import tokenize
from sglang_kvtc.errors import ConfigError, UnsupportedError

NUM_LINES = 50
NUM_QUESTIONS = 5
ANNOUNCEMENT = "\n\nFrom the list above:\n"
"""Between the context and what is asked. Without it a small model continues the list with numbers of its own."""

_WORD_LIST = (
    "apple anchor arrow autumn baker balcony basket beach bell bicycle blanket boat bottle bread bridge brother "
    "bucket butter button cabin camera candle canyon carpet castle cattle chair cherry chimney church circle cloud "
    "coffee copper corner cotton cousin cradle crystal curtain daughter desert diamond dinner doctor dolphin dragon "
    "drawer eagle engine evening falcon farmer father feather fence finger flower forest fountain garden garlic "
    "ginger glass glove guitar hammer harbor helmet honey horse hospital hunter island jacket journey kettle kitchen "
    "ladder lantern leather lemon letter library lion machine magnet maple marble market meadow mirror monkey morning "
    "mother mountain museum needle night ocean office onion orange orchard palace paper parrot pencil pepper piano "
    "picture pigeon pillow planet pocket potato prince puzzle rabbit railway ribbon river rocket saddle sailor salmon "
    "school shadow shoulder silver sister soldier spider spring station stone storm street summer sunset table temple "
    "thunder ticket tiger tower tractor train tunnel turtle uncle valley velvet village violin wagon water weather "
    "whale wheel window winter wizard wolf yard"
)
WORDS = tuple(_WORD_LIST.split())
"""Without digits, and different enough that no two are confused."""


@dataclass(frozen=True, slots=True)
class Question:
    """Tokens that continue the context: the announcement, the word, the colon and its number.

    is_answer: one flag per token, True for those that hold digits of the number.
    """

    token_ids: tuple[int, ...]
    is_answer: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class RetrievalTask:
    """A context of lines `word: ddd`, as token ids, and the questions asked about it."""

    context_ids: tuple[int, ...]
    questions: tuple[Question, ...]


def retrieval_tasks(
    tokenizer: Any, count: int, seed: int, num_lines: int = NUM_LINES, num_questions: int = NUM_QUESTIONS
) -> list[RetrievalTask]:
    """Draw `count` contexts of `num_lines` different words with random three-digit numbers, about 8 tokens each line.

    Raises ConfigError when there are not as many words, UnsupportedError for a tokenizer that joins a question to its
    context.
    """
    if not 0 < num_questions <= num_lines <= len(WORDS):
        raise ConfigError(
            f"{num_questions} questions about {num_lines} lines: expected at most {len(WORDS)} lines and no more "
            "questions than lines"
        )
    generator = random.Random(seed)
    return [_task(tokenizer, generator, num_lines, num_questions) for _ in range(count)]


def count_correct(respond: Respond, task: RetrievalTask) -> int:
    """How many questions of a task are answered with all digits the model's first choice.

    respond: continues `task.context_ids`, or what eviction left of them.
    """
    return sum(
        is_right(question, respond(question.token_ids[:-1]).argmax(dim=-1).tolist()) for question in task.questions
    )


def is_right(question: Question, choices: Sequence[int]) -> bool:
    """Whether the answer is what the model expects, given its first choice after every token but the last."""
    following = zip(choices, question.token_ids[1:], question.is_answer[1:], strict=True)
    return all(choice == token for choice, token, is_answer in following if is_answer)


def _task(tokenizer: Any, generator: random.Random, num_lines: int, num_questions: int) -> RetrievalTask:
    words = generator.sample(WORDS, num_lines)
    lines = [f"{word}: {generator.randrange(1000):03d}" for word in words]
    text = "\n".join(lines)
    context_ids = tokenize(text, tokenizer)
    questions = []
    for line in generator.sample(lines, num_questions):
        token_ids = tokenize(text + ANNOUNCEMENT + line, tokenizer)
        # Tokenised as one text, so that the question is split as it would be in a prompt.
        added = token_ids[len(context_ids) :]
        is_answer = tuple(any(letter.isdigit() for letter in tokenizer.decode([token])) for token in added)
        if token_ids[: len(context_ids)] != context_ids or not any(is_answer[1:]) or is_answer[0]:
            raise UnsupportedError(
                f"this tokenizer does not keep the context's tokens when the line {line!r} follows: the retrieval task "
                "cannot be asked with it"
            )
        questions.append(Question(tuple(added), is_answer))
    return RetrievalTask(tuple(context_ids), tuple(questions))
