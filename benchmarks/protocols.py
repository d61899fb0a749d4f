"""When a growing cache is coded: three protocols under which the same document is read on from the same prefix.

`once`: the prefix is coded and the rest is read on it, whatever it adds staying raw. `every`: the paper's simulation of
short conversations (KVTC section 4): the whole cache is coded again every few tokens, so that errors add up. `turns`:
the tier, where each turn is a node of the prefix tree that is coded a single time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from sglang_kvtc.benchmarks.harness import Passage, log_probs
from sglang_kvtc.benchmarks.schemes import Bytes, CacheCoder, coded_node
from sglang_kvtc.calibrate.reading import read_on
from sglang_kvtc.codec.codec import KVCodec


@dataclass(frozen=True, slots=True)
class Reading:
    """log_probs: after every token of the suffix, f32[num_suffix_tokens, vocabulary]. sizes: when it was last coded."""

    log_probs: torch.Tensor
    sizes: Bytes


def once(model: Any, passage: Passage, coder: CacheCoder) -> Reading:
    """Code the prefix and read the suffix in one piece."""
    cache = coder(passage.keys, passage.values)
    sizes = Bytes()
    sizes.add(cache)
    return Reading(log_probs(model, cache.keys, cache.values, passage.suffix), sizes)


def every(model: Any, passage: Passage, coder: CacheCoder, interval_tokens: int) -> Reading:
    """Code all there is before every `interval_tokens` tokens of the suffix, what was coded before included.

    A coder whose window has w - c tokens leaves c = `interval_tokens` to w of them raw, as the paper does.
    """
    keys, values = passage.keys, passage.values
    outputs = []
    sizes = Bytes()
    for start in range(0, len(passage.suffix), interval_tokens):
        cache = coder(keys, values)
        sizes = Bytes()
        sizes.add(cache)
        output, new_keys, new_values = read_on(
            model, cache.keys, cache.values, passage.suffix[start : start + interval_tokens]
        )
        outputs.append(output)
        keys, values = torch.cat([cache.keys, new_keys], dim=1), torch.cat([cache.values, new_values], dim=1)
    return Reading(torch.cat(outputs), sizes)


def turns(model: Any, passage: Passage, codec: KVCodec, turn_tokens: int, min_coded_tokens: int) -> Reading:
    """The prefix is the first turn and every `turn_tokens` tokens of the suffix are a further one.

    A turn is computed on the restored nodes before it and then becomes a node itself: sinks raw at the beginning of the
    sequence alone, a window at the end of every node in the codec's format. sizes: of all nodes, every frame counted
    whole, since raw and fp8 frames are coded ones here.
    """
    sizes = Bytes()
    keys, values = _restored(codec, passage.keys, passage.values, 0, min_coded_tokens, sizes)
    outputs = []
    for start in range(0, len(passage.suffix), turn_tokens):
        output, new_keys, new_values = read_on(model, keys, values, passage.suffix[start : start + turn_tokens])
        outputs.append(output)
        node = _restored(codec, new_keys, new_values, keys.shape[1], min_coded_tokens, sizes)
        keys, values = (torch.cat([before, new], dim=1) for before, new in zip((keys, values), node, strict=True))
    return Reading(torch.cat(outputs), sizes)


def _restored(
    codec: KVCodec,
    keys: torch.Tensor,
    values: torch.Tensor,
    start_position: int,
    min_coded_tokens: int,
    sizes: Bytes,
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of one node after they were frames, whose bytes are added to `sizes`."""
    coded = coded_node(codec, keys, values, start_position, min_coded_tokens=min_coded_tokens)
    num_bytes = 2 * (keys.numel() + values.numel())
    sizes.merge(Bytes(num_bytes, coded.stored_bytes, num_bytes))
    return coded.keys, coded.values
