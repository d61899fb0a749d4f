"""Token sequences to distil on: short ones, and long ones put together from short ones (Fast KVzip section 3.3).

The paper takes texts of 10K to 30K tokens and joins such texts to 100K tokens, half of all tokens each. Both lengths
are scaled to the context of the model.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

from sglang_kvtc.calibrate.corpus import Document, TokenSequence, in_turn, tokenize
from sglang_kvtc.distill.teacher import CHUNK_TOKENS
from sglang_kvtc.errors import ConfigError

LONGEST_TOKENS = 100_000
_SHORT_SHARES = (0.1, 0.3)
"""Lengths of short texts as shares of a long one."""
_PROMPT_ROOM = 128
"""Positions left for a prompt of the teacher beside the chunk it repeats."""


def long_tokens(context_tokens: int) -> int:
    """Tokens of a long sequence: 100,000, or what the model's context holds beside a repeated chunk and its prompt."""
    # A small context is filled by half: one text, and itself repeated in a single chunk.
    beside_chunk = max(context_tokens - CHUNK_TOKENS - _PROMPT_ROOM, (context_tokens - _PROMPT_ROOM) // 2)
    return min(LONGEST_TOKENS, beside_chunk)


def distillation_sequences(
    documents: Sequence[Document], tokenizer: Any, *, num_tokens: int, longest: int, seed: int
) -> list[TokenSequence]:
    """At least `num_tokens` tokens, half in short and half in joined sequences of `longest` tokens, in mixed order.

    Documents are drawn in turn from their sources, shuffled by `seed`; each gives pieces of a drawn length that do not
    overlap. Raises ConfigError when the text is too short.
    """
    generator = random.Random(seed)
    pieces = _pieces(documents, tokenizer, longest, generator, seed)
    short: list[TokenSequence] = []
    joined: list[TokenSequence] = []
    parts: list[TokenSequence] = []
    num_short = num_joined = 0
    while num_short + num_joined < num_tokens:
        piece = next(pieces, None)
        if piece is None:
            raise ConfigError(
                f"the text yields {num_short + num_joined:,} tokens for distillation, --tokens asks for "
                f"{num_tokens:,}: add text or ask for fewer"
            )
        # What is too short to stand alone is only joined.
        if num_short <= num_joined + sum(len(part.token_ids) for part in parts) and len(piece.token_ids) >= int(
            _SHORT_SHARES[0] * longest
        ):
            short.append(piece)
            num_short += len(piece.token_ids)
            continue
        parts.append(piece)
        token_ids = tuple(token_id for part in parts for token_id in part.token_ids)
        if len(token_ids) >= longest:
            joined.append(TokenSequence(" + ".join(part.name for part in parts), token_ids[:longest]))
            num_joined += longest
            parts = []
    sequences = short + joined
    generator.shuffle(sequences)
    return sequences


def _pieces(
    documents: Sequence[Document], tokenizer: Any, longest: int, generator: random.Random, seed: int
) -> Iterator[TokenSequence]:
    """One piece of every document, then the next piece of those that are longer, and so on."""
    low, high = (int(share * longest) for share in _SHORT_SHARES)
    rest: list[tuple[str, list[int] | str]] = [(document.name, document.text) for document in in_turn(documents, seed)]
    while rest:
        longer: list[tuple[str, list[int] | str]] = []
        for name, text in rest:
            # Tokenized when its turn comes: most of a large corpus is never needed.
            token_ids = tokenize(text, tokenizer) if isinstance(text, str) else text
            length = generator.randint(max(low, 1), max(high, 1))
            if token_ids:
                yield TokenSequence(name, tuple(token_ids[:length]))
            if len(token_ids) > length:
                longer.append((name, token_ids[length:]))
        rest = longer
