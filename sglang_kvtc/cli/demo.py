"""`sglang-kvtc demo`: a real server on a small real model, conversations that outgrow its pool, and what came back.

Two passes over the same conversations: lossless, where a restored prefix must give exactly the output of a
recomputed one, and coded, where the share of equal top-1 tokens is shown. The server itself stores, counts and times.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from sglang_kvtc.calibrate.causal_lm import load_tokenizer
from sglang_kvtc.calibrate.corpus import BUILTIN, read_documents, split_documents
from sglang_kvtc.calibrate.demo_artifact import demo_artifact
from sglang_kvtc.calibrate.demo_model import demo_model_dir
from sglang_kvtc.cli.bench import Row, format_table
from sglang_kvtc.cli.progress import TerminalProgress
from sglang_kvtc.cli.server_process import ServerProcess, temporary_server

QUESTIONS = (
    "Summarise the text above in two sentences.",
    "Which term of the text is the most important one, and why?",
    "Write one question that the text answers.",
)
_CHARACTERS_PER_TOKEN = 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--conversations", type=int, default=4, help="conversations held in turn (default 4)")
    parser.add_argument("--document-tokens", type=int, default=1200, help="tokens of text each one is about")
    parser.add_argument("--answer-tokens", type=int, default=32, help="tokens generated per turn")
    parser.add_argument("--pool-tokens", type=int, default=4096, help="device pool, smaller than all conversations")
    parser.add_argument("--ratio", type=float, default=16.0, help="target ratio of the coded pass")


@dataclass(slots=True)
class Conversation:
    """Messages so far, and the prompt and answer of the last turn."""

    messages: list[dict[str, str]]
    prompt: list[int] = field(default_factory=list)
    answer: list[int] = field(default_factory=list)


def run(args: argparse.Namespace) -> int:
    model_dir = demo_model_dir()
    tokenizer = load_tokenizer(model_dir)
    print("calibrating, unless the cache folder has the artifact already ...", flush=True)
    artifact = demo_artifact(TerminalProgress())
    failures: list[str] = []
    # In bf16 the shape of a batch decides near-ties, with any cache; exactness is shown in fp32.
    for name, ratio, dtype in (("lossless", 1.0, "float32"), ("coded", args.ratio, "auto")):
        print(f"\n{name} pass: starting the server (takes a minute on two cores) ...", flush=True)
        server = temporary_server(
            model_dir,
            *("--max-total-tokens", str(args.pool_tokens), "--dtype", dtype),
            config=f"[codec]\ntarget_ratio = {ratio}\n",
            artifact=artifact,
        )
        with server as process:
            failures += _hold_conversations(process, tokenizer, args, exact=name == "lossless")
    for failure in failures:
        print(f"FAILED: {failure}")
    return 1 if failures else 0


def _hold_conversations(server: ServerProcess, tokenizer: Any, args: argparse.Namespace, exact: bool) -> list[str]:
    conversations = [Conversation([]) for _ in range(args.conversations)]
    documents = _documents(tokenizer, args.conversations, args.document_tokens)
    rows: list[Row] = []
    restored = 0
    for turn, question in enumerate(QUESTIONS, start=1):
        for index, conversation in enumerate(conversations):
            text = f"{documents[index]}\n\n{question}" if turn == 1 else question
            conversation.messages.append({"role": "user", "content": text})
            conversation.prompt = _render(tokenizer, conversation.messages)
            generation = server.generate(conversation.prompt, args.answer_tokens)
            conversation.answer = generation.output_ids
            answer = tokenizer.decode(generation.output_ids, skip_special_tokens=True)
            conversation.messages.append({"role": "assistant", "content": answer})
            restored += generation.cached_compressed
            rows.append(
                {
                    "turn": turn,
                    "conversation": index + 1,
                    "prompt tokens": generation.prompt_tokens,
                    "cached on device": generation.cached_device,
                    "cached compressed": generation.cached_compressed,
                    "first token s": round(generation.ttft_s, 2),
                }
            )
    print(format_table(rows))
    _print_storage(server)
    failures = [] if restored else ["no prefix was restored"]
    if exact:
        failures += _check_exact(server, conversations, args.answer_tokens)
    else:
        _print_agreement(server, conversations, args.answer_tokens)
    return failures


def _print_storage(server: ServerProcess) -> None:
    stats = server.wait_encoded()
    if not stats["frame_tokens"]:
        return
    stored, tokens = stats["frame_bytes"], stats["frame_tokens"]
    raw = tokens * stats["raw_bytes_per_token"]
    print(
        f"stored {stored:,.0f} bytes for {tokens:,.0f} tokens, raw {raw:,.0f} bytes: {raw / stored:.1f}x with every "
        f"byte counted\ntokens restorable per GB: {1e9 * tokens / stored:,.0f}, stock "
        f"{1e9 / stats['raw_bytes_per_token']:,.0f}"
    )


def _check_exact(server: ServerProcess, conversations: Sequence[Conversation], answer_tokens: int) -> list[str]:
    failures = []
    for index, conversation in enumerate(conversations, start=1):
        server.flush()
        recomputed = server.generate(conversation.prompt, answer_tokens).output_ids
        if recomputed != conversation.answer:
            failures.append(f"conversation {index}: the restored answer differs from the recomputed one")
    if not failures:
        print(f"greedy output equals recomputation in all {len(conversations)} conversations")
    return failures


def _print_agreement(server: ServerProcess, conversations: Sequence[Conversation], answer_tokens: int) -> None:
    """Recompute every answer, then let restored and recomputed prefixes predict it token by token."""
    references = []
    for conversation in conversations:
        server.flush()
        answer = server.generate(conversation.prompt, answer_tokens).output_ids
        references.append((answer, server.predict(conversation.prompt, answer).top1))
    server.flush()
    for conversation in conversations:
        server.generate(conversation.prompt, 1)
    equal = total = compressed = 0
    for conversation, (answer, expected) in zip(conversations, references, strict=True):
        prediction = server.predict(conversation.prompt, answer)
        equal += sum(a == b for a, b in zip(prediction.top1, expected, strict=True))
        total += len(expected)
        compressed += prediction.cached_compressed
    print(
        f"top-1 agreement with recomputation: {equal} of {total} tokens ({100 * equal / total:.1f} %), "
        f"{compressed:,} prompt tokens restored"
    )


def _render(tokenizer: Any, messages: Sequence[dict[str, str]]) -> list[int]:
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return ids


def _documents(tokenizer: Any, count: int, num_tokens: int) -> list[str]:
    """Held-out texts of about `num_tokens` tokens: nothing the calibration saw."""
    _, held_out = split_documents(read_documents([BUILTIN], tokenizer))
    long_enough = [d.text for d in held_out if len(d.text) > 2 * _CHARACTERS_PER_TOKEN * num_tokens]
    cut = [tokenizer.decode(tokenizer.encode(t[: 8 * num_tokens])[:num_tokens]) for t in long_enough[:count]]
    return cut
