"""Importance of every KV pair by what attends to it: the targets that gates are trained on.

The teacher is KVzip (arXiv 2505.23416, Fast KVzip section 3.3): the model is asked to repeat its context chunk by
chunk, and a pair is as important as the largest attention probability it receives meanwhile. The other two targets are
those of Fast KVzip's Figure 5.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import DynamicCache

from sglang_kvtc.calibrate.attention_hook import attention_by, causal_attention
from sglang_kvtc.calibrate.causal_lm import model_geometry
from sglang_kvtc.distill.peaks import raise_peaks
from sglang_kvtc.errors import ConfigError
from sglang_kvtc.types import TokenRange

CHUNK_TOKENS = 2048
SINK_TOKENS = 4
_PREVIOUS_TOKENS = 8
_REPEAT_FIRST = "\n\nRepeat the previous context exactly."
_REPEAT_NEXT = "\n\nRepeat the part of the previous context exactly, starting with"
_INSTRUCTIONS = (
    "\n\nSummarize the text above in two sentences.",
    "\n\nWhich names does the text above mention, and what does it say about each of them?",
    "\n\nWhat is the most important statement of the text above?",
)
_ANSWER_TOKENS = 48


class Target(enum.StrEnum):
    """What a gate is trained to predict."""

    RECONSTRUCTION = "reconstruction"
    NEXT_TOKEN = "next-token"
    INSTRUCTION = "instruction"


class Context:
    """A prefilled context of one sequence, ready to be asked about any number of times.

    Attention to the context goes through `attention_by`, and the cache is cut back after every question.
    """

    def __init__(self, model: Any, tokenizer: Any, token_ids: Sequence[int]) -> None:
        """Prefill `token_ids` in chunks. Raises ConfigError for none."""
        if not token_ids:
            raise ConfigError("a context without tokens has no importance scores: check the text")
        self.token_ids = list(token_ids)
        self._model = model
        self._tokenizer = tokenizer
        geometry = model_geometry(model.config.get_text_config(decoder=True))
        self._num_layers, self._num_kv_heads = geometry.num_layers, geometry.num_kv_heads
        self._cache = DynamicCache(config=model.config)
        self._next_token_peaks = self._new_peaks(len(token_ids))
        self._answer_start = ""
        if tokenizer.chat_template is not None:
            self._answer_start = _answer_start(tokenizer)

    def prefill(self, *, next_token_peaks: bool = False) -> None:
        """Fill the cache, in chunks of 2,048 tokens. Hooks of the caller see the context's own hidden states here."""

        def observe(layer: int, queries: torch.Tensor, keys: torch.Tensor, scaling: float) -> None:
            if next_token_peaks:
                raise_peaks(self._next_token_peaks[layer][:, : keys.shape[1]], queries, keys, scaling)

        for start in range(0, len(self.token_ids), CHUNK_TOKENS):
            self._forward(self.token_ids[start : start + CHUNK_TOKENS], observe)

    def keys(self) -> torch.Tensor:
        """Keys of the context after RoPE: dtype[num_layers, num_tokens, num_kv_heads, head_dim]."""
        return torch.stack([layer.keys[0].transpose(0, 1) for layer in self._cache.layers])

    def next_token_scores(self) -> torch.Tensor:
        """Largest attention from any later token of the context: f32[num_layers, num_tokens, num_kv_heads].

        `prefill` must have been told to observe it. The last token is seen by none and scores 0.
        """
        return _scores(self._next_token_peaks)

    def reconstruction_scores(self) -> torch.Tensor:
        """KVzip scores, f32[num_layers, num_tokens, num_kv_heads] in [0, 1].

        Every chunk of 2,048 tokens is repeated after a prompt. The softmax of a repeating query runs over the context's
        first four tokens, the chunk and the repeated tokens up to the query.
        """
        peaks = self._new_peaks(len(self.token_ids))
        for start in range(0, len(self.token_ids), CHUNK_TOKENS):
            self._repeat(TokenRange(start, min(start + CHUNK_TOKENS, len(self.token_ids))), peaks)
        return _scores(peaks)

    def _repeat(self, chunk: TokenRange, peaks: Sequence[torch.Tensor]) -> None:
        """Ask for the tokens of one chunk, feed them and raise their peaks."""
        num_sinks = min(SINK_TOKENS, chunk.start)

        def observe(layer: int, queries: torch.Tensor, keys: torch.Tensor, scaling: float) -> None:
            own = keys[:, -queries.shape[1] :]
            seen = torch.cat([keys[:, :num_sinks], keys[:, chunk.start : chunk.stop], own], dim=1)
            raise_peaks(peaks[layer][:, chunk.start : chunk.stop], queries, seen, scaling, num_sinks)

        prompt = self._tokenize(_REPEAT_NEXT if chunk.start else _REPEAT_FIRST)
        prompt += self.token_ids[max(chunk.start - _PREVIOUS_TOKENS, 0) : chunk.start]
        prompt += self._tokenize(self._answer_start)
        self._forward(prompt + self.token_ids[chunk.start : chunk.stop], observe)
        self._forget()

    def instruction_scores(self) -> torch.Tensor:
        """Largest attention while instructions about the context are read and answered, shaped like the others."""
        peaks = self._new_peaks(len(self.token_ids))

        def observe(layer: int, queries: torch.Tensor, keys: torch.Tensor, scaling: float) -> None:
            raise_peaks(peaks[layer], queries, keys, scaling)

        for instruction in _INSTRUCTIONS:
            new_tokens = self._tokenize(instruction) + self._tokenize(self._answer_start)
            for _ in range(_ANSWER_TOKENS):
                hidden_state = self._forward(new_tokens, observe)
                with torch.inference_mode():
                    new_tokens = [int(self._model.get_output_embeddings()(hidden_state).argmax())]
            self._forget()
        return _scores(peaks)

    def _new_peaks(self, num_tokens: int) -> list[torch.Tensor]:
        shape = (self._num_kv_heads, num_tokens)
        return [torch.zeros(shape, device=self._model.device) for _ in range(self._num_layers)]

    def _forward(
        self, token_ids: Sequence[int], observe: Callable[[int, torch.Tensor, torch.Tensor, float], None]
    ) -> torch.Tensor:
        """Append tokens to the cache; returns the last hidden state, dtype[hidden size]."""

        def attend(
            layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float
        ) -> torch.Tensor:
            observe(layer, queries, keys, scaling)
            return causal_attention(queries, keys, values, scaling)

        input_ids = torch.tensor([list(token_ids)], device=self._model.device)
        with torch.inference_mode(), attention_by(self._model, attend):
            # The base model: no logits, which would cost more than the rest for a large vocabulary.
            output = self._model.base_model(input_ids=input_ids, past_key_values=self._cache, use_cache=True)
        last: torch.Tensor = output.last_hidden_state[0, -1]
        return last

    def _forget(self) -> None:
        """Drop everything after the context."""
        self._cache.crop(len(self.token_ids) - self._cache.get_seq_length())

    def _tokenize(self, text: str) -> list[int]:
        token_ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return token_ids


def reconstruction_scores(model: Any, tokenizer: Any, token_ids: Sequence[int]) -> torch.Tensor:
    """KVzip scores of a context as `Context.reconstruction_scores` gives them."""
    context = Context(model, tokenizer, token_ids)
    context.prefill()
    return context.reconstruction_scores()


def _scores(peaks: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.stack([layer.T for layer in peaks])


def _answer_start(tokenizer: Any) -> str:
    """What the chat template writes between the end of a user's turn and the answer."""
    marker = "kvtc-context"
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": marker}], add_generation_prompt=True, tokenize=False
    )
    return str(text).rpartition(marker)[2]
