"""What each choice of the codec is worth, one part per table of the paper's appendix B.

`sinks` (Table 6), `window` (Table 12), `layers` per PCA (Table 15, there without the quantiser), calibration `tokens`
(Table 8) and `domains` of calibration text (Tables 9 and 11); given artifacts (--artifact) are compared as they are.
Every setting is measured on the same held-out documents and tasks.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_kvtc.artifact.io import load_artifact, save_artifact
from sglang_kvtc.benchmarks.accuracy import score
from sglang_kvtc.benchmarks.harness import SINK_TOKENS, WINDOW_TOKENS, Passage, load_passages
from sglang_kvtc.benchmarks.schemes import (
    Calibrated,
    Scheme,
    add_model_arguments,
    find_artifacts,
    find_model,
    schemes,
)
from sglang_kvtc.benchmarks.tasks import add_task_arguments, check_lengths, comma_separated, draw_tasks
from sglang_kvtc.calibrate.calibration import cached_calibration, calibrate
from sglang_kvtc.calibrate.causal_lm import DTYPES, load_model, load_tokenizer
from sglang_kvtc.calibrate.corpus import BUILTIN, Document, read_documents, split_documents
from sglang_kvtc.calibrate.demo_artifact import demo_calibration
from sglang_kvtc.calibrate.progress import Progress
from sglang_kvtc.cli.progress import TerminalProgress
from sglang_kvtc.errors import ConfigError

HELP = "KL and accuracy by sinks, window, layers per PCA, calibration tokens and calibration domain"

LAYERS_WINDOW = 16
"""Window of the part `layers`, as in Table 15."""
LAYERS_DPQ_RATIO = 8.0


@dataclass(frozen=True, slots=True)
class Case:
    """One row: a scheme under one setting of one part."""

    part: str
    setting: str
    scheme: Scheme


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Parts and their settings, and the sizes of what they are measured on."""
    add_model_arguments(parser)
    parser.add_argument("--parts", type=comma_separated, default=tuple(_PARTS), help=f"of {','.join(_PARTS)}")
    parser.add_argument("--ratios", type=_numbers, default=(16.0, 64.0), help="target ratios (default 16,64)")
    parser.add_argument("--windows", type=_integers, default=(0, 16, 64, 128), help="default 0,16,64,128")
    parser.add_argument("--layers", type=_integers, default=(), help="layers per PCA (default: powers of two, and all)")
    parser.add_argument(
        "--calibration-tokens", type=_integers, default=(4000, 16_000, 48_000), help="default 4000,16000,48000"
    )
    parser.add_argument("--documents", type=int, default=3, help="held-out documents of a domain (default %(default)s)")
    parser.add_argument("--prefix-tokens", type=int, default=1024, help="coded context (default %(default)s)")
    parser.add_argument("--suffix-tokens", type=int, default=192, help="tokens scored after it (default %(default)s)")
    add_task_arguments(parser, ("key-value", "variables"), 10)
    parser.add_argument("--seed", type=int, default=0, help="of documents and tasks (default %(default)s)")


def run(args: argparse.Namespace) -> list[dict[str, object]]:
    """Return one row per part, setting and method; the full cache comes first."""
    if unknown := [part for part in args.parts if part not in _PARTS]:
        raise ConfigError(f"--parts {','.join(unknown)}: expected some of {', '.join(_PARTS)}")
    progress = TerminalProgress()
    model_dir = find_model(args)
    tokenizer = load_tokenizer(model_dir)
    tasks = draw_tasks(args, tokenizer)
    raw_tokens = SINK_TOKENS + max(WINDOW_TOKENS, *args.windows)
    check_lengths(tasks, raw_tokens)
    if args.prefix_tokens <= raw_tokens:
        raise ConfigError(f"--prefix-tokens {args.prefix_tokens}: expected more than the {raw_tokens} that stay raw")
    documents, held_out = split_documents(read_documents([BUILTIN], tokenizer))
    given = find_artifacts(args, model_dir, progress)
    setup = _Setup(args, model_dir, given, documents, progress)
    cases = [case for part in args.parts for case in _PARTS[part](setup)]
    model = load_model(model_dir, "float32")
    passages = _passages(args, model, tokenizer, held_out, given[0])
    full, *compared = [schemes((), given)[0], *(case.scheme for case in cases)]
    cache_dtype = DTYPES[given[0].artifact.geometry.dtype]
    reference, *scores = score(model, [full, *compared], tasks, passages, cache_dtype, progress)
    rows: list[dict[str, object]] = [{"part": "", "setting": "", "method": full.name, **reference.columns()}]
    for case, found in zip(cases, scores, strict=True):
        rows.append({"part": case.part, "setting": case.setting, "method": case.scheme.name, **found.columns()})
    return rows


@dataclass(frozen=True, slots=True)
class _Setup:
    """What the parts are made from. given: the artifacts named, or the default one. documents: calibration text."""

    args: argparse.Namespace
    model_dir: Path
    given: list[Calibrated]
    documents: list[Document]
    progress: Progress

    @property
    def methods(self) -> list[str]:
        return [f"kvtc{ratio:g}" for ratio in self.args.ratios]

    def calibrated(self, **changes: Any) -> Calibrated:
        """The default artifact of the model with some settings changed, from the cache folder if it was made before."""
        settings = demo_calibration(self.model_dir, self.args.tokens)
        settings = dataclasses.replace(settings, ratios=self.ratios, **changes)
        return Calibrated("", load_artifact(cached_calibration(settings, self.args.cache_dir, self.progress)))

    @property
    def ratios(self) -> tuple[float, ...]:
        """Of new artifacts: what is asked for and what gives a basis its columns."""
        return tuple(dict.fromkeys((*self.args.ratios, LAYERS_DPQ_RATIO)))


def _sinks(setup: _Setup) -> Iterator[Case]:
    for sink_tokens in (0, SINK_TOKENS):
        for scheme in schemes(setup.methods, setup.given, sink_tokens=sink_tokens)[1:]:
            yield Case("sinks", f"first {sink_tokens} raw", scheme)


def _window(setup: _Setup) -> Iterator[Case]:
    for window_tokens in setup.args.windows:
        for scheme in schemes(setup.methods, setup.given, window_tokens=window_tokens)[1:]:
            yield Case("window", f"last {window_tokens} raw", scheme)


def _layers(setup: _Setup) -> Iterator[Case]:
    num_layers = setup.given[0].artifact.geometry.num_layers
    powers = tuple(2**power for power in range(num_layers.bit_length()) if 2**power < num_layers)
    for layers in setup.args.layers or (*powers, num_layers):
        one = setup.calibrated(layers_per_group=layers)
        for scheme in schemes([f"dpq{LAYERS_DPQ_RATIO:g}", *setup.methods], [one], window_tokens=LAYERS_WINDOW)[1:]:
            yield Case("layers", f"{layers} per PCA", scheme)


def _tokens(setup: _Setup) -> Iterator[Case]:
    for num_tokens in setup.args.calibration_tokens:
        for scheme in schemes(setup.methods, [setup.calibrated(num_tokens=num_tokens)])[1:]:
            yield Case("tokens", f"{num_tokens:,} tokens", scheme)


def _domains(setup: _Setup) -> Iterator[Case]:
    """One calibration for each source of the builtin text, and one for all of it, of the same number of tokens."""
    found = {"all domains": setup.calibrated()}
    for source in dict.fromkeys(document.source for document in setup.documents):
        found[source] = _calibrated_on([one for one in setup.documents if one.source == source], setup)
    for name, one in found.items():
        for scheme in schemes(setup.methods, [one])[1:]:
            yield Case("domains", name, scheme)


def _artifacts(setup: _Setup) -> Iterator[Case]:
    for one in setup.given:
        for scheme in schemes(setup.methods, [Calibrated("", one.artifact)])[1:]:
            yield Case("artifacts", one.label or "default", scheme)


_PARTS: dict[str, Callable[[_Setup], Iterator[Case]]] = {
    "artifacts": _artifacts,
    "sinks": _sinks,
    "window": _window,
    "layers": _layers,
    "tokens": _tokens,
    "domains": _domains,
}


def _calibrated_on(documents: list[Document], setup: _Setup) -> Calibrated:
    """An artifact of text of our own, which takes the way of a user's file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "documents.jsonl"
        path.write_text("".join(json.dumps({"text": one.text}) + "\n" for one in documents), encoding="utf-8")
        settings = demo_calibration(setup.model_dir, setup.args.tokens)
        settings = dataclasses.replace(settings, data=(str(path),), ratios=setup.ratios)
        # Frames carry the artifact's digest, which it gets when it is written.
        return Calibrated("", save_artifact(calibrate(settings, setup.progress), Path(folder) / "artifact"))


def _passages(
    args: argparse.Namespace, model: Any, tokenizer: Any, held_out: list[Document], one: Calibrated
) -> dict[str, list[Passage]]:
    """Held-out passages by domain, the last word of the source's name."""
    if args.documents == 0:
        return {}
    found = {}
    for source in dict.fromkeys(document.source for document in held_out):
        found[source.rpartition(" ")[2]] = load_passages(
            model,
            tokenizer,
            [document for document in held_out if document.source == source],
            count=args.documents,
            prefix_tokens=args.prefix_tokens,
            suffix_tokens=args.suffix_tokens,
            cache_dtype=DTYPES[one.artifact.geometry.dtype],
            seed=args.seed,
        )
    return found


def _numbers(text: str) -> tuple[float, ...]:
    return tuple(float(part) for part in text.split(","))


def _integers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))
