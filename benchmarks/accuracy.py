"""Schemes on the same passages and tasks: what the tables of accuracy have in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from sglang_kvtc.benchmarks.harness import Change, Passage, compare, log_probs, mean_and_error, means
from sglang_kvtc.benchmarks.retrieval import RetrievalTask
from sglang_kvtc.benchmarks.schemes import Bytes, Scheme
from sglang_kvtc.benchmarks.tasks import answered
from sglang_kvtc.calibrate.causal_lm import prefill
from sglang_kvtc.calibrate.progress import Progress


@dataclass(slots=True, eq=False)
class Score:
    """What was found of one scheme.

    correct: by task and context, a flag per question. changes: by domain, one per passage. sizes: by task, and of all
    passages under "".
    """

    scheme: Scheme
    correct: dict[str, list[list[bool]]] = field(default_factory=dict)
    changes: dict[str, list[Change]] = field(default_factory=dict)
    sizes: dict[str, Bytes] = field(default_factory=dict)

    def columns(self) -> dict[str, object]:
        """Ratios over everything, KL and top-1 of the passages, and a percentage with its standard error per task.

        The errors are over contexts and passages: questions about one context are not independent.
        """
        whole = Bytes()
        for sizes in self.sizes.values():
            whole.merge(sizes)
        columns = whole.columns()
        changes = [change for group in self.changes.values() for change in group]
        if changes:
            columns |= mean_and_error("kl", [change.kl / change.num_tokens for change in changes])
            columns |= {name: value for name, value in means(changes).items() if name != "kl"}
        if len(self.changes) > 1:
            columns |= {f"kl_{domain}": means(group)["kl"] for domain, group in self.changes.items()}
        for task, contexts in self.correct.items():
            name = task.replace("-", "_")
            accuracies = mean_and_error(name, [100 * sum(flags) / len(flags) for flags in contexts])
            columns[f"{name}_pct"] = accuracies[name]
            columns |= {key: value for key, value in accuracies.items() if key != name}
        return columns

    def correct_at(self, task: str, index: int) -> float:
        """Percentage of the contexts of a task whose question number `index` is answered."""
        contexts = self.correct[task]
        return 100 * sum(flags[index] for flags in contexts) / len(contexts)


def score(
    model: Any,
    schemes: Sequence[Scheme],
    tasks: Mapping[str, Sequence[RetrievalTask]],
    passages: Mapping[str, Sequence[Passage]],
    cache_dtype: torch.dtype,
    progress: Progress,
) -> list[Score]:
    """Every scheme on every context and passage, each of which is prefilled once.

    tasks: by name. passages: by domain. cache_dtype: of the engine's cache, which prefilled K and V are rounded to.
    """
    scores = [Score(scheme) for scheme in schemes]
    for name, contexts in tasks.items():
        with progress.stage(name, len(contexts) * len(scores), "evaluations") as advance:
            for task in contexts:
                keys, values = (heads.to(cache_dtype) for heads in prefill(model, task.context_ids))
                for one in scores:
                    cache = one.scheme.code(keys, values)
                    one.sizes.setdefault(name, Bytes()).add(cache)
                    one.correct.setdefault(name, []).append(answered(model, cache.keys, cache.values, task))
                    advance(1)
    for domain, group in passages.items():
        with progress.stage(f"held-out {domain}", len(group) * len(scores), "evaluations") as advance:
            for passage in group:
                for one in scores:
                    cache = one.scheme.code(passage.keys, passage.values)
                    one.sizes.setdefault("", Bytes()).add(cache)
                    changed = log_probs(model, cache.keys, cache.values, passage.suffix)
                    one.changes.setdefault(domain, []).append(compare(passage.log_probs, changed, passage.suffix))
                    advance(1)
    return scores
