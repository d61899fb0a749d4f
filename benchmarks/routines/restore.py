"""Time to first token on the live server: prefix restored from frames against prefix recomputed.

Every prompt is sent three times as P + [x]: first when nothing is cached (recomputed), then when P was compressed and
its device copy is gone (restored), then again at once (device hit: what the engine alone needs). All in one run on one
server, prompts interleaved, medians reported.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path

from sglang_kvtc.benchmarks.prompts import builtin_prompts
from sglang_kvtc.calibrate.demo_artifact import demo_artifact
from sglang_kvtc.calibrate.demo_model import demo_model_dir
from sglang_kvtc.cli.progress import TerminalProgress
from sglang_kvtc.cli.server_process import ServerError, ServerProcess, temporary_server

HELP = "time to first token with a restored prefix against recomputing it, on a live server"

STALE_AFTER_S = 0.2

STAGES = ("open_s", "reconstruct_s", "scatter_s")
"""Seconds of the worker per restore: entropy decoding, unpacking and dequantising; projection and rotation; writing
into the pool. `bench codec` splits the first two further. The engine itself needs `ttft_device_hit_s`."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prefix-tokens", type=int, nargs="+", default=[1024, 4096], metavar="N")
    parser.add_argument("--repeats", type=int, default=9, help="prompts per prefix length")
    parser.add_argument("--ratio", type=float, default=16.0, help="target ratio of the codec")


def run(args: argparse.Namespace) -> list[dict[str, object]]:
    model_dir = demo_model_dir()
    artifact = demo_artifact(TerminalProgress())
    tier = f"[tier]\nstale_after_s = {STALE_AFTER_S}\nstale_min_usage = 0.0\n"
    server = temporary_server(
        model_dir,
        *("--max-total-tokens", str(2 * max(args.prefix_tokens) + 1024)),
        config=f"[codec]\ntarget_ratio = {args.ratio}\n{tier}",
        artifact=artifact,
    )
    with server as process:
        process.generate(builtin_prompts(model_dir, 1, 256, skip=1000)[0])
        return [_measure(process, model_dir, tokens, args.repeats) for tokens in args.prefix_tokens]


def _measure(server: ServerProcess, model_dir: Path, prefix_tokens: int, repeats: int) -> dict[str, object]:
    recomputed, restored, device = [], [], []
    stages = dict.fromkeys(STAGES, 0.0)
    for prompt in builtin_prompts(model_dir, repeats, prefix_tokens + 1):
        server.flush()
        recomputed.append(server.generate(prompt, max_new_tokens=1).ttft_s)
        server.wait_compressed(prefix_tokens)
        before = server.tier_stats()
        hit = server.generate(prompt, max_new_tokens=1)
        if hit.cached_compressed < prefix_tokens - 1:
            raise ServerError(f"only {hit.cached_compressed} of {prefix_tokens} tokens came back compressed")
        restored.append(hit.ttft_s)
        device.append(server.generate(prompt, max_new_tokens=1).ttft_s)
        after = server.tier_stats()
        for stage in STAGES:
            stages[stage] += (after[stage] - before[stage]) / repeats
    return {
        "prefix_tokens": prefix_tokens,
        "ttft_restored_s": _median(restored),
        "ttft_recomputed_s": _median(recomputed),
        "ratio": _median(restored) / _median(recomputed),
        "ttft_device_hit_s": _median(device),
        **stages,
    }


def _median(values: Sequence[float]) -> float:
    return statistics.median(values)
