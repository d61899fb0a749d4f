from __future__ import annotations

import pytest
from transformers import PreTrainedTokenizerFast

from sglang_kvtc.calibrate.corpus import Document, TokenSequence
from sglang_kvtc.distill.teacher import CHUNK_TOKENS
from sglang_kvtc.distill.text import LONGEST_TOKENS, distillation_sequences, long_tokens
from sglang_kvtc.errors import ConfigError

LONGEST = 200


def documents(count: int = 40, length: int = 300) -> list[Document]:
    """Texts of different lengths in which no stretch of four characters occurs twice."""
    texts, number = [], 0
    for index in range(count):
        size = 5 + (length * (index + 1)) // count
        texts.append("".join(f"{number + step:04d}" for step in range(size // 4 + 1))[:size])
        number += size // 4 + 1
    return [Document("prose" if index % 2 else "code", f"document {index}", text) for index, text in enumerate(texts)]


def draw(tokenizer: PreTrainedTokenizerFast, num_tokens: int = 3000, seed: int = 0) -> list[TokenSequence]:
    return distillation_sequences(documents(), tokenizer, num_tokens=num_tokens, longest=LONGEST, seed=seed)


def test_half_of_the_tokens_are_in_short_and_half_in_long_sequences(tokenizer: PreTrainedTokenizerFast) -> None:
    lengths = [len(sequence.token_ids) for sequence in draw(tokenizer)]
    long = [length for length in lengths if length == LONGEST]
    short = [length for length in lengths if length != LONGEST]
    assert all(0.1 * LONGEST <= length <= 0.3 * LONGEST for length in short)
    assert len(set(short)) > 5
    assert abs(sum(long) - sum(short)) <= 2 * LONGEST
    assert 3000 <= sum(lengths) < 3000 + LONGEST


def test_long_sequences_join_several_documents_and_no_text_is_used_twice(tokenizer: PreTrainedTokenizerFast) -> None:
    sequences = draw(tokenizer)
    assert all(" + " in sequence.name for sequence in sequences if len(sequence.token_ids) == LONGEST)
    texts = [tokenizer.decode(sequence.token_ids) for sequence in sequences]
    sources = [document.text for document in documents()]
    stretches = [text[start : start + 16] for text in texts for start in range(0, len(text) - 16, 16)]
    whole = [stretch for stretch in stretches if any(stretch in source for source in sources)]
    # Most lie inside one piece; those across a seam are nowhere in the text.
    assert len(whole) > 0.7 * len(stretches)
    assert len(set(whole)) == len(whole)


def test_the_seed_decides_and_nothing_else_does(tokenizer: PreTrainedTokenizerFast) -> None:
    assert draw(tokenizer) == draw(tokenizer)
    assert draw(tokenizer) != draw(tokenizer, seed=1)


def test_too_little_text_is_refused_with_the_figures(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(ConfigError, match=r"yields [\d,]+ tokens .* asks for 1,000,000"):
        draw(tokenizer, num_tokens=1_000_000)


@pytest.mark.parametrize("context_tokens", [512, 2048, 4096, 8192, 32_768, 131_072, 1_000_000])
def test_a_long_sequence_leaves_room_for_its_repetition(context_tokens: int) -> None:
    longest = long_tokens(context_tokens)
    assert 0 < longest <= LONGEST_TOKENS
    assert longest + min(longest, CHUNK_TOKENS) + 100 <= context_tokens
