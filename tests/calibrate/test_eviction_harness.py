"""The eviction harness, the published scorers and the retrieval task, against transformers' own attention."""

import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedTokenizerFast

from sglang_kvtc.benchmarks import presses
from sglang_kvtc.benchmarks.eviction import Context, all_kept, continuation, prefill_context
from sglang_kvtc.benchmarks.harness import log_probs, standard_error
from sglang_kvtc.benchmarks.retrieval import ANNOUNCEMENT, WORDS, count_correct, retrieval_tasks
from sglang_kvtc.calibrate.attention_hook import attention_modules
from sglang_kvtc.calibrate.causal_lm import load_model
from sglang_kvtc.codec.rope import rope_spec_from_config
from sglang_kvtc.errors import ConfigError, UnsupportedError

NUM_TOKENS, GROUP = 90, 2
generator = random.Random(0)
TOKEN_IDS = [generator.randrange(256) for _ in range(NUM_TOKENS)]
SUFFIX = [generator.randrange(256) for _ in range(12)]
TOLERANCE = 1e-4
"""Of log-probabilities and attention in fp32, between two orders of the same sums."""


@pytest.fixture(scope="module")
def model(tiny_llama: Path) -> Any:
    return load_model(tiny_llama, "float32")


@pytest.fixture(scope="module")
def context(model: Any) -> Context:
    return prefill_context(model, TOKEN_IDS)


def by_transformers(model: Any, kept: torch.Tensor) -> torch.Tensor:
    """The continuation in one pass over all tokens, with an additive mask of our own for each layer and head."""
    num_all = NUM_TOKENS + len(SUFFIX)
    hooks = []
    for layer, module in enumerate(attention_modules(model)):
        allowed = torch.ones(num_all, num_all, dtype=torch.bool).tril().repeat(GROUP * kept.shape[2], 1, 1)
        for head in range(len(allowed)):
            for token in range(NUM_TOKENS):
                if not kept[layer, token, head // GROUP]:
                    allowed[head, NUM_TOKENS:, token] = False
        mask = torch.zeros(1, *allowed.shape).masked_fill(~allowed, -math.inf)

        def with_mask(module: Any, args: Any, kwargs: Any, mask: torch.Tensor = mask) -> Any:
            return args, {**kwargs, "attention_mask": mask}

        hooks.append(module.register_forward_pre_hook(with_mask, with_kwargs=True))
    try:
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([TOKEN_IDS + SUFFIX])).logits[0, NUM_TOKENS:]
    finally:
        for hook in hooks:
            hook.remove()
    return torch.log_softmax(logits, dim=-1)


def test_a_full_cache_gives_what_the_model_itself_gives(model: Any, context: Context) -> None:
    ours = continuation(model, context, all_kept(context), SUFFIX)
    torch.testing.assert_close(ours, log_probs(model, context.keys, context.values, SUFFIX), atol=TOLERANCE, rtol=0)
    # And again, to the last bit.
    assert torch.equal(ours, continuation(model, context, all_kept(context), SUFFIX))


def test_evicted_pairs_are_invisible_to_their_layer_and_head_alone(model: Any, context: Context) -> None:
    kept = torch.rand(context.keys.shape[:3], generator=torch.Generator().manual_seed(1)) < 0.4
    kept[1, :, 1] = False  # a head that has lost everything
    ours = continuation(model, context, kept, SUFFIX)
    torch.testing.assert_close(ours, by_transformers(model, kept), atol=TOLERANCE, rtol=0)
    full = continuation(model, context, all_kept(context), SUFFIX)
    assert float((ours - full).abs().max()) > 100 * TOLERANCE


def test_tokens_keep_their_positions_when_others_are_evicted_everywhere(model: Any, context: Context) -> None:
    left = [0, 1, 2, 3, *range(50, NUM_TOKENS)]
    kept = torch.zeros(context.keys.shape[:3], dtype=torch.bool)
    kept[:, left] = True
    cache = DynamicCache(config=model.config)
    for layer in range(len(context.keys)):
        sides = (side[layer, left].transpose(0, 1)[None].clone() for side in (context.keys, context.values))
        cache.update(*sides, layer)
    positions = torch.arange(NUM_TOKENS, NUM_TOKENS + len(SUFFIX))[None]
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([SUFFIX]), position_ids=positions, past_key_values=cache).logits[0]
    ours = continuation(model, context, kept, SUFFIX)
    torch.testing.assert_close(ours, logits.log_softmax(dim=-1), atol=TOLERANCE, rtol=0)


def test_a_context_shows_what_entered_and_left_the_projections(model: Any, context: Context) -> None:
    attention = model.model.layers[1].self_attn
    with torch.inference_mode():
        values = attention.v_proj(context.hidden[1]).view(NUM_TOKENS, 2, 32)
        output = model(input_ids=torch.tensor([TOKEN_IDS]), output_hidden_states=True)
        hidden = model.model.layers[1].input_layernorm(output.hidden_states[1][0])
    torch.testing.assert_close(context.values[1], values, atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(context.hidden[1], hidden, atol=TOLERANCE, rtol=0)
    assert context.queries.shape == (2, NUM_TOKENS, 4, 32)
    assert context.scaling == (32**-0.5, 32**-0.5)


def test_snapkv_averages_the_attention_of_the_last_64_tokens(tiny_llama: Path, context: Context) -> None:
    eager = load_model(tiny_llama, "float32")
    eager.set_attn_implementation("eager")
    with torch.inference_mode():
        attentions = eager(input_ids=torch.tensor([TOKEN_IDS]), output_attentions=True).attentions
    scores = presses.snapkv(context)
    num_earlier = NUM_TOKENS - 64
    for layer, attention in enumerate(attentions):
        means = attention[0, :, num_earlier:, :num_earlier].mean(dim=1)
        for head in range(2):
            row = (means[2 * head] + means[2 * head + 1]) / 2
            for token in range(num_earlier):
                near = [float(row[t]) if 0 <= t < num_earlier else 0.0 for t in range(token - 2, token + 3)]
                assert float(scores[layer, token, head]) == pytest.approx(sum(near) / 5, abs=TOLERANCE)
    assert float(scores[:, num_earlier:].min()) > float(scores[:, :num_earlier].max())


def test_snapkv_and_expected_attention_refuse_contexts_they_cannot_score(model: Any) -> None:
    with pytest.raises(ConfigError, match=r"last 64 tokens, but the context has 60.*leave it out of --methods"):
        presses.snapkv(prefill_context(model, TOKEN_IDS[:60]))
    with pytest.raises(ConfigError, match="more than 4 tokens of context, found 4"):
        presses.expected_attention(prefill_context(model, TOKEN_IDS[:4]), rope_spec_from_config(model.config.to_dict()))


def test_expected_attention_is_that_of_normal_queries_at_future_positions(model: Any, context: Context) -> None:
    """Queries taken from the projection instead of being rotated back, rotation by complex numbers, in fp64."""
    scores = presses.expected_attention(context, rope_spec_from_config(model.config.to_dict()))
    angles = torch.arange(NUM_TOKENS, NUM_TOKENS + 512).double()[:, None] * 10000.0 ** (-torch.arange(16).double() / 16)
    turn = torch.polar(torch.ones_like(angles), angles).mean(dim=0)
    matrix = torch.zeros(32, 32, dtype=torch.float64)
    for pair in range(16):
        matrix[pair, pair] = matrix[pair + 16, pair + 16] = turn[pair].real
        matrix[pair + 16, pair], matrix[pair, pair + 16] = turn[pair].imag, -turn[pair].imag
    for layer in range(2):
        attention = model.model.layers[layer].self_attn
        with torch.inference_mode():
            queries = attention.q_proj(context.hidden[layer]).double().view(NUM_TOKENS, 4, 32)[4:]
        for head in range(2):
            keys = context.keys[layer, 4:, head].double()
            expected = torch.zeros(NUM_TOKENS - 4, dtype=torch.float64)
            for query_head in (2 * head, 2 * head + 1):
                samples = queries[:, query_head]
                mean = matrix @ samples.mean(dim=0)
                covariance = matrix @ torch.cov(samples.T, correction=0) @ matrix.T
                logits = torch.stack([mean @ key / 32**0.5 + key @ covariance @ key / 64 for key in keys])
                expected += logits.softmax(dim=0) / 2
            norms = context.values[layer, 4:, head].double().norm(dim=-1)
            wanted = (expected + 1e-2) * norms
            torch.testing.assert_close(scores[layer, 4:, head].double(), wanted, atol=TOLERANCE, rtol=TOLERANCE)
    assert float(scores[:, :4].min()) > float(scores[:, 4:].max())


def test_scores_of_single_keys(context: Context) -> None:
    norms, differences = presses.key_norm(context), presses.key_difference(context)
    for layer, head in ((0, 1), (1, 0)):
        keys = context.keys[layer, :, head].double()
        units = [key / math.sqrt(sum(float(x) ** 2 for x in key)) for key in keys]
        anchor = sum(units, torch.zeros(32, dtype=torch.float64))
        for token in (0, 7, NUM_TOKENS - 1):
            assert float(norms[layer, token, head]) == pytest.approx(-float(keys[token].norm()), rel=1e-5)
            cosine = float(units[token] @ anchor / anchor.norm())
            assert float(differences[layer, token, head]) == pytest.approx(-cosine, abs=1e-5)


def test_streaming_llm_ranks_the_first_four_tokens_and_then_the_latest(context: Context) -> None:
    scores = presses.streaming_llm(context)
    for layer in range(2):
        for head in range(2):
            ranked = sorted(range(NUM_TOKENS), key=lambda t: float(scores[layer, t, head]), reverse=True)
            assert ranked == [0, 1, 2, 3, *range(NUM_TOKENS - 1, 3, -1)]


def test_random_scores_follow_seed_and_context(model: Any, context: Context) -> None:
    scores = presses.random_scores(context, 0)
    assert torch.equal(scores, presses.random_scores(context, 0))
    assert not torch.equal(scores, presses.random_scores(context, 1))
    shorter = prefill_context(model, TOKEN_IDS[:-1])
    assert not torch.equal(scores[:, :-1], presses.random_scores(shorter, 0))


def test_retrieval_asks_for_lines_of_its_context(tokenizer: PreTrainedTokenizerFast) -> None:
    assert len(set(WORDS)) == len(WORDS) and all(word.isalpha() for word in WORDS)
    tasks = retrieval_tasks(tokenizer, 3, seed=5)
    assert tasks == retrieval_tasks(tokenizer, 3, seed=5)
    assert tasks != retrieval_tasks(tokenizer, 3, seed=6)
    for task in tasks:
        lines = tokenizer.decode(list(task.context_ids)).split("\n")
        assert len({line.partition(":")[0] for line in lines}) == 50
        asked = set()
        for question in task.questions:
            text = tokenizer.decode(list(question.token_ids))
            assert text.startswith(ANNOUNCEMENT)
            assert text.removeprefix(ANNOUNCEMENT) in lines
            answer = [token for token, flag in zip(question.token_ids, question.is_answer, strict=True) if flag]
            assert tokenizer.decode(answer) == text[-3:]
            asked.add(text)
        assert len(asked) == 5


def test_a_question_counts_when_all_its_digits_come_first(tokenizer: PreTrainedTokenizerFast) -> None:
    (task,) = retrieval_tasks(tokenizer, 1, seed=0, num_lines=10, num_questions=4)

    def respond(wrong_at: int | None, questions: Sequence[int]) -> Any:
        def continue_with(token_ids: Sequence[int]) -> torch.Tensor:
            index = next(i for i, q in enumerate(task.questions) if q.token_ids[:-1] == tuple(token_ids))
            scores = torch.zeros(len(token_ids), 256)
            for place, token in enumerate(task.questions[index].token_ids[1:]):
                scores[place, token] = 1
            if wrong_at is not None and index in questions:
                scores[wrong_at] = scores[wrong_at].roll(1)
            return scores

        return continue_with

    assert count_correct(respond(None, []), task) == 4
    # The first digit, and the last.
    assert count_correct(respond(-3, [1]), task) == 3
    assert count_correct(respond(-1, [0, 2]), task) == 2
    # What is not the number need not be foreseen.
    assert count_correct(respond(3, [0, 1, 2, 3]), task) == 4


def test_retrieval_refuses_what_it_cannot_ask(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(ConfigError, match="2 questions about 1 lines"):
        retrieval_tasks(tokenizer, 1, seed=0, num_lines=1, num_questions=2)

    class Joining:
        """Reads all of a text as one token."""

        bos_token, is_fast = None, True

        def __call__(self, text: str, **options: object) -> dict[str, list[int]]:
            return {"input_ids": [len(text)]}

        def decode(self, token_ids: list[int]) -> str:
            return str(token_ids)

    with pytest.raises(UnsupportedError, match="does not keep the context's tokens"):
        retrieval_tasks(Joining(), 1, seed=0)


def test_standard_error_needs_two_samples() -> None:
    assert standard_error([1.0]) is None
    assert standard_error([1.0, 3.0, 5.0, 7.0]) == pytest.approx(math.sqrt(20 / 3) / 2)
