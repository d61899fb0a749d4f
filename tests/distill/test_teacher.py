from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from sglang_kvtc.calibrate.causal_lm import load_model
from sglang_kvtc.distill import teacher
from sglang_kvtc.distill.teacher import Context, reconstruction_scores
from sglang_kvtc.errors import ConfigError

TEXT = "the quick brown fox jumps over the lazy dog; "
PROMPTS = (
    "\n\nRepeat the previous context exactly.",
    "\n\nRepeat the part of the previous context exactly, starting with",
)
ANSWER = "\n"
"""What the tiny model's template puts between the user's text and the answer."""


@pytest.fixture(scope="module")
def model(tiny_llama: Path) -> Any:
    return load_model(tiny_llama, "float32")


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(teacher, "CHUNK_TOKENS", 20)
    return 20


def all_probabilities(model: Any, token_ids: list[int]) -> torch.Tensor:
    """Attention of the whole sequence by transformers' own eager code: f32[layers, KV heads, group, query, key]."""
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        attentions = model(torch.tensor([token_ids]), output_attentions=True, use_cache=False).attentions
    model.set_attn_implementation(before)
    return torch.cat(attentions).unflatten(1, (2, -1))


def tokens_of(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    token_ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return token_ids


@pytest.mark.parametrize("num_tokens", [1, 3, 20, 47])
def test_reconstruction_scores_are_those_of_plain_attention(
    model: Any, tokenizer: PreTrainedTokenizerFast, small_chunks: int, num_tokens: int
) -> None:
    context = tokens_of(tokenizer, TEXT * 2)[:num_tokens]
    expected = torch.zeros(2, num_tokens, 2)
    for start in range(0, num_tokens, small_chunks):
        chunk = context[start : start + small_chunks]
        prompt = tokens_of(tokenizer, PROMPTS[start > 0]) + context[max(start - 8, 0) : start]
        probabilities = all_probabilities(model, context + prompt + tokens_of(tokenizer, ANSWER) + chunk)
        new = probabilities[:, :, :, num_tokens:]
        stop, num_sinks = start + len(chunk), min(4, start)
        seen = torch.cat([new[..., :num_sinks], new[..., start:stop], new[..., num_tokens:]], dim=-1)
        seen = seen / seen.sum(dim=-1, keepdim=True)
        expected[:, start:stop] = seen[..., num_sinks : num_sinks + len(chunk)].amax(dim=(2, 3)).transpose(1, 2)
    scores = reconstruction_scores(model, tokenizer, context)
    assert scores.shape == (2, num_tokens, 2)
    torch.testing.assert_close(scores, expected, rtol=1e-4, atol=1e-6)


def test_next_token_scores_are_those_of_plain_attention(
    model: Any, tokenizer: PreTrainedTokenizerFast, small_chunks: int
) -> None:
    context = tokens_of(tokenizer, TEXT)
    probabilities = all_probabilities(model, context)
    later = probabilities * torch.ones(len(context), len(context)).tril(-1)
    observed = Context(model, tokenizer, context)
    observed.prefill(next_token_peaks=True)
    torch.testing.assert_close(
        observed.next_token_scores(), later.amax(dim=(2, 3)).transpose(1, 2), rtol=1e-4, atol=1e-6
    )


def test_instruction_scores_are_those_of_plain_attention(
    model: Any, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(teacher, "_ANSWER_TOKENS", 3)
    monkeypatch.setattr(teacher, "_INSTRUCTIONS", ("\n\nWhy?", "\n\nWho jumps?"))
    context = tokens_of(tokenizer, TEXT)
    expected = torch.zeros(2, len(context), 2)
    for instruction in ("\n\nWhy?", "\n\nWho jumps?"):
        sequence = context + tokens_of(tokenizer, instruction + ANSWER)
        for _ in range(2):
            with torch.inference_mode():
                sequence.append(int(model(torch.tensor([sequence])).logits[0, -1].argmax()))
        probabilities = all_probabilities(model, sequence)[..., len(context) :, : len(context)]
        expected = torch.maximum(expected, probabilities.amax(dim=(2, 3)).transpose(1, 2))
    asked = Context(model, tokenizer, context)
    asked.prefill()
    torch.testing.assert_close(asked.instruction_scores(), expected, rtol=1e-4, atol=1e-6)
    # Questions leave no trace: the cache is the context's again.
    torch.testing.assert_close(asked.instruction_scores(), expected, rtol=1e-4, atol=1e-6)


def test_a_context_without_tokens_is_refused(model: Any, tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(ConfigError, match="without tokens"):
        Context(model, tokenizer, [])


def test_the_model_attends_as_before_afterwards(model: Any, tokenizer: PreTrainedTokenizerFast) -> None:
    context = tokens_of(tokenizer, TEXT)
    with torch.inference_mode():
        before = model(torch.tensor([context])).logits
        reconstruction_scores(model, tokenizer, context)
        assert torch.equal(model(torch.tensor([context])).logits, before)
