"""The servers that `bench eviction` compares, and its parts that measure load: many requests, and one long answer."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import torch

from sglang_kvtc.benchmarks.live_load import LOG_EVERY_STEP, DecodeStep, Load, send_together
from sglang_kvtc.benchmarks.prompts import builtin_prompts
from sglang_kvtc.benchmarks.upkeep import Upkeep
from sglang_kvtc.calibrate.progress import Progress
from sglang_kvtc.cli.server_process import ServerProcess, temporary_server
from sglang_kvtc.config import EvictionConfig
from sglang_kvtc.gates.io import GateFile
from sglang_kvtc.types import ModelGeometry

Row = dict[str, object]

STOCK = "stock"
STRICT_CHECKS = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1"}
"""SGLang counts its memory in every step and dies where a token is missing."""
WARM_UP_TOKENS = 64
"""Of the prompts that a server gets before anything is timed."""
_SPARE_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Setup:
    """What all servers have in common. chunk_tokens: of a prompt in one forward pass."""

    model_dir: Path
    geometry: ModelGeometry
    gates: Path
    chunk_tokens: int

    def server(
        self,
        pool_tokens: int,
        budget: str = "",
        *flags: str,
        config: str = "",
        artifact: Path | None = None,
        strict: bool = True,
    ) -> AbstractContextManager[ServerProcess]:
        """A server of `pool_tokens` tokens of memory.

        budget: lines of `[eviction.budget]`, empty for no gates. config: other tables of the configuration. artifact:
        turns the compressed tier on. strict: STRICT_CHECKS.
        """
        gated = ["--kvtc-gates", str(self.gates)] if budget else []
        return temporary_server(
            self.model_dir,
            *("--max-total-tokens", str(pool_tokens), "--chunked-prefill-size", str(self.chunk_tokens)),
            *LOG_EVERY_STEP,
            *gated,
            *flags,
            config=config + (f"[eviction.budget]\n{budget}\n" if budget else ""),
            artifact=artifact,
            env=STRICT_CHECKS if strict else None,
        )

    def warm_up(self, server: ServerProcess) -> None:
        """Let the server compile and allocate what its first requests need, and forget them."""
        prompt = builtin_prompts(self.model_dir, 1, WARM_UP_TOKENS)
        send_together(server, [prompt[0], prompt[0][1:]], 4)
        server.flush()


def keep_lines(share: float) -> str:
    """Lines of `[eviction.budget]` for a share that stays."""
    return f"keep_fraction = {share}"


def name_of(share: float | None) -> str:
    """Of a server that keeps this share; None for the stock one."""
    return STOCK if share is None else f"keep {share:g}"


def measure_concurrency(
    setup: Setup,
    keep: Sequence[float],
    gates: GateFile,
    progress: Progress,
    *,
    requests: int,
    prompt_tokens: int,
    new_tokens: int,
    pool_tokens: int,
) -> list[Row]:
    """Many long prompts at once in a fixed pool: stock, then each share."""
    prompts = builtin_prompts(setup.model_dir, requests, prompt_tokens)
    rows: list[Row] = []
    for share in (None, *keep):
        starting = setup.server(pool_tokens, "" if share is None else keep_lines(share))
        with starting as server, progress.stage(f"concurrency, {name_of(share)}", requests, "requests") as done:
            setup.warm_up(server)
            load = send_together(server, prompts, new_tokens)
            done(requests)
            tables = server.eviction_stats()["overhead_bytes"] if share is not None else 0
        row = load_row(load, name_of(share), prompt_tokens)
        kv_bytes = pool_tokens * setup.geometry.bytes_per_token
        buffered = buffer_bytes(gates, setup.geometry) * load.together if share is not None else 0
        row |= {"kv_bytes": kv_bytes, "table_bytes": int(tables), "buffer_bytes": buffered}
        rows.append(row)
    return compare_concurrency(rows)


def load_row(load: Load, name: str, prompt_tokens: int) -> Row:
    """What one server did with one load."""
    return {
        "part": "concurrency",
        "server": name,
        "requests": len(load.answers),
        "prompt_tokens": prompt_tokens,
        "new_tokens": len(load.answers[0].output_ids),
        "together": load.together,
        "tokens_in_use": load.tokens_in_use,
        "in_use_per_prompt_token": load.tokens_in_use / (load.together * prompt_tokens),
        "retracted": load.retracted,
        "wall_s": load.wall_s,
        "output_tokens_per_s": load.output_tokens_per_s,
        "ttft_s": load.ttft_s,
        "token_latency_ms": 1e3 * load.token_latency_s,
    }


def compare_concurrency(rows: Sequence[Row]) -> list[Row]:
    """Add how many more requests ran together than on the first row's server, and the same for equal memory."""
    stock = rows[0]
    compared = []
    for row in rows:
        more = _number(row, "together") / _number(stock, "together")
        memory = sum(_number(row, name) for name in ("kv_bytes", "table_bytes", "buffer_bytes"))
        compared.append(
            {
                **row,
                "together_over_stock": more,
                "at_equal_memory": more * _number(stock, "kv_bytes") / memory,
                "throughput_over_stock": _number(row, "output_tokens_per_s") / _number(stock, "output_tokens_per_s"),
            }
        )
    return compared


def buffer_bytes(gates: GateFile, geometry: ModelGeometry) -> int:
    """Memory of the hidden states that one running request buffers between two evictions."""
    config = gates.gates.config
    return EvictionConfig().decode_interval * config.num_layers * config.input_features * geometry.element_bytes


def measure_overhead(
    setup: Setup,
    shares: Sequence[float],
    gates: GateFile,
    progress: Progress,
    *,
    batches: Sequence[int],
    context_tokens: int,
    steps: int,
) -> list[Row]:
    """Decode steps of the stock backend and of ours, and how much of ours is upkeep."""
    prompts = builtin_prompts(setup.model_dir, max(batches), context_tokens)
    pool_tokens = max(batches) * (context_tokens + steps + _SPARE_TOKENS) + setup.chunk_tokens
    upkeep: dict[tuple[str, int], dict[str, float]] = {}
    with progress.stage("overhead, upkeep", len(shares) * len(batches), "cases") as done, torch.inference_mode():
        for kept in shares:
            for batch in batches:
                costs = Upkeep(gates, setup.geometry, kept, batch, context_tokens)
                upkeep[name_of(kept), batch] = costs.measure()
                done(1)
    steps_s: dict[tuple[str, int], float] = {}
    for share in (None, *shares):
        name = name_of(share)
        # The strict checks would be in the time of a step.
        starting = setup.server(pool_tokens, "" if share is None else keep_lines(share), strict=False)
        with starting as server, progress.stage(f"overhead, {name}", len(batches), "batches") as done:
            setup.warm_up(server)
            for batch in batches:
                load = send_together(server, prompts[:batch], steps)
                steps_s[name, batch] = statistics.median(load.step_s(batch))
                server.flush()
                done(1)
    return overhead_rows(steps_s, upkeep, context_tokens)


def overhead_rows(
    steps_s: Mapping[tuple[str, int], float],
    upkeep: Mapping[tuple[str, int], Mapping[str, float]],
    context_tokens: int,
) -> list[Row]:
    """Rows from the time of a decode step and the milliseconds of upkeep in it, both by server and batch."""
    rows: list[Row] = []
    for (name, batch), seconds in steps_s.items():
        row: Row = {
            "part": "overhead",
            "server": name,
            "batch": batch,
            "context_tokens": context_tokens,
            "step_ms": 1e3 * seconds,
            "step_over_stock": seconds / steps_s[STOCK, batch],
        }
        if (name, batch) in upkeep:
            parts = upkeep[name, batch]
            total_ms = sum(parts.values())
            row |= {"upkeep_ms": total_ms, "upkeep_share": total_ms / (1e3 * seconds), **parts}
        rows.append(row)
    return rows


def measure_generation(
    setup: Setup, keep_tokens: int, progress: Progress, *, prompt_tokens: int, new_tokens: int
) -> tuple[list[Row], dict[str, list[DecodeStep]]]:
    """One long answer: the memory it takes while it grows, on stock and under a fixed budget.

    Returns rows, and every decode step of each server.
    """
    prompt = builtin_prompts(setup.model_dir, 1, prompt_tokens)
    longest = prompt_tokens + new_tokens + _SPARE_TOKENS
    rows: list[Row] = []
    curves: dict[str, list[DecodeStep]] = {}
    for name, budget in ((STOCK, ""), (f"{keep_tokens} tokens", f"keep_tokens = {keep_tokens}")):
        # The context is what a budget of tokens is checked against.
        starting = setup.server(longest, budget, "--context-length", str(longest))
        with starting as server, progress.stage(f"generation, {name}", new_tokens, "tokens") as done:
            setup.warm_up(server)
            load = send_together(server, prompt, new_tokens)
            done(new_tokens)
        curves[name] = load.steps
        rows += generation_rows(load, name, prompt_tokens)
    return rows, curves


def generation_rows(load: Load, name: str, prompt_tokens: int, parts: int = 4) -> list[Row]:
    """The end of each of `parts` equal parts of the answer: memory then, and the time of its tokens."""
    arrivals = load.answers[0].arrivals_s
    rows: list[Row] = []
    for part in range(parts):
        first, last = len(arrivals) * part // parts, len(arrivals) * (part + 1) // parts - 1
        steps = load.steps[first : last + 1]
        rows.append(
            {
                "part": "generation",
                "server": name,
                "prompt_tokens": prompt_tokens,
                "new_tokens": last + 1,
                "most_tokens_in_use": max(step.tokens for step in steps),
                "ms_per_token": 1e3 * (arrivals[last] - arrivals[first]) / max(1, last - first),
            }
        )
    return rows


def plot_generation(curves: dict[str, list[DecodeStep]], path: Path) -> None:
    """Draw the memory in use after every generated token to `path`, one line per server."""
    # The canvas that needs no display, whatever the environment asks for.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    panel = figure.subplots()
    for name, steps in curves.items():
        panel.plot(range(1, len(steps) + 1), [step.tokens for step in steps], label=name)
    panel.set(xlabel="generated tokens", ylabel="memory in use [tokens]", ylim=(0, None))
    panel.legend()
    figure.savefig(path, dpi=120)


def _number(row: Row, name: str) -> float:
    value = row[name]
    assert isinstance(value, int | float)
    return value
