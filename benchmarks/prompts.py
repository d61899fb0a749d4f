"""Real prompts for benchmarks and engine tests: held-out builtin text as token ids."""

from __future__ import annotations

from pathlib import Path

from sglang_kvtc.calibrate.causal_lm import load_tokenizer
from sglang_kvtc.calibrate.corpus import BUILTIN, read_documents, split_documents
from sglang_kvtc.errors import ConfigError


def builtin_prompts(model_dir: Path, count: int, num_tokens: int, skip: int = 0) -> list[list[int]]:
    """`count` different prompts of exactly `num_tokens` tokens that share no prefix.

    Consecutive stretches of all held-out documents, the first of them after `skip` tokens. Each starts with a token of
    its own, since documents may begin alike. Raises ConfigError if there is too little text.
    """
    tokenizer = load_tokenizer(model_dir)
    _, held_out = split_documents(read_documents([BUILTIN], tokenizer))
    needed = skip + count * num_tokens
    ids: list[int] = []
    for document in held_out:
        ids += tokenizer.encode(document.text, add_special_tokens=False)
        if len(ids) >= needed:
            break
    if len(ids) < needed:
        raise ConfigError(f"the builtin text has {len(ids)} held-out tokens, {needed} are needed")
    prompts = [ids[skip + i * num_tokens : skip + (i + 1) * num_tokens] for i in range(count)]
    for index, prompt in enumerate(prompts):
        prompt[0] = 1000 + skip + index
    return prompts
