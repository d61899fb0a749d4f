"""A small model of another family: Qwen3, made of the demo model's layers and trained on built-in text.

No package carries a small Qwen checkpoint. This one has fewer layers than the demo model, another rotary base, and the
norm of queries and keys before RoPE that sets the family's KV cache apart. `bench quality --family qwen` uses it.
"""

from __future__ import annotations

import json
import logging
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from sglang_kvtc.artifact.container import replace_file
from sglang_kvtc.artifact.fingerprint import fingerprint_model
from sglang_kvtc.calibrate.cached_dir import cached_dir
from sglang_kvtc.calibrate.causal_lm import load_model, load_tokenizer, model_geometry
from sglang_kvtc.calibrate.corpus import BUILTIN, Document, in_turn, read_documents, split_documents, tokenize
from sglang_kvtc.calibrate.demo_model import default_cache_dir, demo_model_dir
from sglang_kvtc.calibrate.progress import Progress
from sglang_kvtc.errors import ConfigError

logger = logging.getLogger(__name__)

NAME = "SmolLM2-as-Qwen3"
RECORD = "training.json"
"""File of the model directory: how it was trained, the loss of every step, and the loss on held-out text."""
_RECIPE = "1"
"""Part of the manifest: a directory made by another version of this file is rebuilt."""
_SAVE_EVERY = 50
"""Steps between two checkpoints, which take about 1 GB of disk and a second or two each."""
_ROWS_FOR_NORMS = 4
_HELD_OUT_ROWS = 12
_HELD_OUT_TOKENS = 1216
"""Of each held-out document, as many as `bench quality` reads."""
_COPIED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "hidden_act",
    "rms_norm_eps",
    "max_position_embeddings",
    "tie_word_embeddings",
    "bos_token_id",
    "eos_token_id",
)
"""Fields of the configuration that stay."""


@dataclass(frozen=True, slots=True)
class QwenTraining:
    """How a Llama model becomes a Qwen3 model.

    layers: those that are kept. The default is what is left when the layer without which the demo model predicts
    built-in text best is taken out, ten times. rope_theta: the new rotary base. row_tokens, rows_per_step: tokens that
    are read together, and how many such rows make a step. learning_rate: after the warm-up.
    """

    layers: tuple[int, ...] = (0, 1, 2, 8, 9, 10, 11, 12, 15, 16, 17, 18, 19, 20, 21, 23, 24, 27, 28, 29)
    rope_theta: float = 1e6
    row_tokens: int = 1024
    rows_per_step: int = 1
    steps: int = 600
    learning_rate: float = 5e-4
    seed: int = 0


def small_qwen_dir(
    progress: Progress,
    cache_dir: Path | None = None,
    *,
    training: QwenTraining | None = None,
    llama_dir: Path | None = None,
) -> Path:
    """Return the Hugging Face directory of the Qwen3 model, built on first use (about 40 minutes on two cores).

    cache_dir: parent folder, by default `default_cache_dir()`. training: QwenTraining() by default. llama_dir: the
    model that it is made of and whose tokenizer it gets, by default the demo model.

    A directory is verified and built as `cached_dir` says. An interrupted training goes on where it was last saved.
    Built with as many threads, the same model comes out, to the bit. Raises ConfigError when the built-in text has
    no row of tokens.
    """
    cache_dir, training = cache_dir or default_cache_dir(), training or QwenTraining()
    source = llama_dir or demo_model_dir(cache_dir)
    recipe = json.dumps(
        {"version": _RECIPE, "llama": fingerprint_model(source).digest, **asdict(training)}, sort_keys=True
    )
    checkpoint = cache_dir / f"{NAME}.checkpoint.safetensors"

    def build(target: Path) -> None:
        _build(source, target, training, _Checkpoint(checkpoint, recipe), progress)
        checkpoint.unlink(missing_ok=True)

    return cached_dir(cache_dir / NAME, recipe, build)


def _build(source: Path, target: Path, training: QwenTraining, checkpoint: _Checkpoint, progress: Progress) -> None:
    tokenizer = load_tokenizer(source)
    llama = load_model(source, "bfloat16")
    calibration, held_out = split_documents(read_documents([BUILTIN], tokenizer))
    rows = list(islice(training_rows(calibration, tokenizer, training), training.steps * training.rows_per_step))
    qwen = qwen_from_llama(llama, training, torch.stack(rows[:_ROWS_FOR_NORMS]))
    losses = _train(qwen, rows, training, checkpoint, progress)
    held_out_rows = _beginnings(held_out, tokenizer)
    record = {
        "training": asdict(training),
        "losses": losses,
        "held_out_documents": len(held_out_rows),
        "held_out_nll": {
            name: _held_out_nll(model, held_out_rows) for name, model in (("llama", llama), ("qwen", qwen))
        },
    }
    logger.info("held-out loss in nats per token: %s", record["held_out_nll"])
    qwen.save_pretrained(target)
    tokenizer.save_pretrained(target)
    (target / RECORD).write_text(json.dumps(record, indent=1), encoding="utf-8")


def training_rows(documents: Sequence[Document], tokenizer: Any, training: QwenTraining) -> Iterator[torch.Tensor]:
    """Rows of consecutive tokens, i64[row_tokens], without end.

    The documents of a source, shuffled by the seed and joined, are cut into rows, which are drawn in random order. How
    often a source is drawn goes with the square root of its size; one that is used up begins again. Raises ConfigError
    when there is no whole row.
    """
    joined: dict[str, list[int]] = {}
    for document in in_turn(documents, training.seed):
        token_ids = joined.setdefault(document.source, [])
        token_ids += tokenize(document.text, tokenizer)
        if tokenizer.eos_token_id is not None:
            token_ids.append(tokenizer.eos_token_id)
    length = training.row_tokens
    rows = {
        source: torch.tensor(token_ids[: len(token_ids) // length * length]).view(-1, length)
        for source, token_ids in joined.items()
        if len(token_ids) >= length
    }
    if not rows:
        raise ConfigError(f"the text has no {length} tokens to train on")
    shares = [math.sqrt(len(of_source)) for of_source in rows.values()]
    generator = random.Random(training.seed)
    left: dict[str, list[int]] = {source: [] for source in rows}
    while True:
        (source,) = generator.choices(list(rows), shares)
        if not left[source]:
            left[source] = generator.sample(range(len(rows[source])), len(rows[source]))
        yield rows[source][left[source].pop()]


def qwen_from_llama(llama: Any, training: QwenTraining, token_ids: torch.Tensor) -> Any:
    """A Qwen3 model in bfloat16 with the weights of some of a Llama model's layers.

    token_ids: i64[num_rows, num_tokens] to measure the Llama's queries and keys on: the new norms start as the root of
    their mean square, the same for all channels, so that they keep the direction of each query and key before RoPE and,
    on average, its length.
    """
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = llama.config
    qwen = Qwen3ForCausalLM(
        Qwen3Config(
            **{name: getattr(config, name) for name in _COPIED},
            head_dim=model_geometry(config).head_dim,
            num_hidden_layers=len(training.layers),
            rope_parameters={"rope_theta": training.rope_theta, "rope_type": "default"},
        )
    ).to(torch.bfloat16)
    lengths = _query_and_key_rms(llama, training.layers, token_ids)
    with torch.no_grad():
        for name in ("embed_tokens", "norm"):
            getattr(qwen.model, name).load_state_dict(getattr(llama.model, name).state_dict())
        qwen.lm_head.load_state_dict(llama.lm_head.state_dict())
        for layer, index, (q_rms, k_rms) in zip(qwen.model.layers, training.layers, lengths, strict=True):
            norms = {
                f"self_attn.{side}_norm.weight": torch.full((model_geometry(config).head_dim,), rms)
                for side, rms in (("q", q_rms), ("k", k_rms))
            }
            layer.load_state_dict(llama.model.layers[index].state_dict() | norms)
    return qwen


def _query_and_key_rms(llama: Any, layers: Sequence[int], token_ids: torch.Tensor) -> list[tuple[float, float]]:
    """Root mean square of the query and the key channels of some layers, over tokens and heads."""
    found: dict[str, float] = {}

    def hook(name: str) -> Any:
        def keep(module: Any, inputs: Any, output: torch.Tensor) -> None:
            found[name] = math.sqrt(float(output.float().square().mean()))

        return keep

    names = [[f"layers.{index}.self_attn.{side}_proj" for side in "qk"] for index in layers]
    handles = [
        llama.model.get_submodule(name).register_forward_hook(hook(name)) for of_layer in names for name in of_layer
    ]
    try:
        with torch.inference_mode():
            llama.model(input_ids=token_ids, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return [(found[q_name], found[k_name]) for q_name, k_name in names]


def _train(
    qwen: Any,
    rows: Sequence[torch.Tensor],
    training: QwenTraining,
    checkpoint: _Checkpoint,
    progress: Progress,
) -> list[float]:
    """Train the bfloat16 model in place on `rows`, in their order; returns the loss of every step.

    Gradients are computed in bfloat16, which is twice as fast as fp32 where the CPU has AMX, and applied to weights in
    fp32, in which small steps are not lost.
    """
    weights = dict(qwen.named_parameters())
    masters = {name: weight.detach().float().requires_grad_() for name, weight in weights.items()}
    optimizer = torch.optim.AdamW(masters.values(), betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    losses = checkpoint.restore(masters, optimizer)
    qwen.train()
    with progress.stage("training", training.steps, "steps") as advance:
        advance(len(losses))
        for step in range(len(losses), training.steps):
            with torch.no_grad():
                for name, weight in weights.items():
                    weight.copy_(masters[name])
            first = step * training.rows_per_step
            batch = torch.stack(list(rows[first : first + training.rows_per_step]))
            loss = _loss(qwen, batch)
            loss.backward()
            for name, weight in weights.items():
                masters[name].grad = weight.grad.float()
                weight.grad = None
            torch.nn.utils.clip_grad_norm_(masters.values(), 1.0)
            for group in optimizer.param_groups:
                group["lr"] = training.learning_rate * learning_rate_factor(step, training.steps)
            optimizer.step()
            losses.append(float(loss.detach()))
            if (step + 1) % _SAVE_EVERY == 0:
                checkpoint.save(masters, optimizer, losses)
            advance(1)
    with torch.no_grad():
        for name, weight in weights.items():
            weight.copy_(masters[name])
    qwen.eval()
    return losses


def learning_rate_factor(step: int, steps: int) -> float:
    """Factor of the learning rate: a linear warm-up over 5% of the steps, then a cosine down to 0."""
    warm_up = max(1, steps // 20)
    return min((step + 1) / warm_up, 0.5 + 0.5 * math.cos(math.pi * step / steps))


def _loss(qwen: Any, batch: torch.Tensor) -> torch.Tensor:
    """Loss of predicting the next token, in nats. batch: i64[num_rows, num_tokens]."""
    logits = qwen(input_ids=batch, use_cache=False).logits[:, :-1].float()
    return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


class _Checkpoint:
    """Weights, optimizer and losses of an unfinished training, on disk."""

    def __init__(self, path: Path, recipe: str) -> None:
        self._path, self._recipe = path, recipe

    def restore(self, masters: dict[str, torch.Tensor], optimizer: torch.optim.Optimizer) -> list[float]:
        """Load what was saved last and return the losses so far: none where there is nothing of this recipe."""
        try:
            with safe_open(self._path, framework="pt") as opened:
                metadata = opened.metadata()
                if metadata["recipe"] != self._recipe:
                    return []
                stored = {key: opened.get_tensor(key) for key in sorted(opened.keys())}
        except FileNotFoundError:
            return []
        except (OSError, SafetensorError) as error:
            logger.warning("%s cannot be read (%s): the training starts again", self._path, error)
            return []
        for key, tensor in stored.items():
            part, _, name = key.partition(".")
            if part == "weight":
                masters[name].data.copy_(tensor)
            else:
                optimizer.state[masters[name]][part] = tensor
        losses: list[float] = json.loads(metadata["losses"])
        return losses

    def save(self, masters: dict[str, torch.Tensor], optimizer: torch.optim.Optimizer, losses: Sequence[float]) -> None:
        tensors = {f"weight.{name}": master.detach() for name, master in masters.items()}
        for name, master in masters.items():
            tensors |= {f"{part}.{name}": tensor for part, tensor in optimizer.state[master].items()}
        metadata = {"recipe": self._recipe, "losses": json.dumps(list(losses))}
        replace_file(self._path, lambda unfinished: save_file(tensors, unfinished, metadata), "checkpoint")


def _beginnings(documents: Sequence[Document], tokenizer: Any) -> list[torch.Tensor]:
    """The first tokens of some documents, drawn in turn from their sources."""
    rows: list[torch.Tensor] = []
    for document in in_turn(documents, seed=0):
        token_ids = tokenize(document.text, tokenizer)[:_HELD_OUT_TOKENS]
        if len(token_ids) == _HELD_OUT_TOKENS:
            rows.append(torch.tensor(token_ids))
        if len(rows) == _HELD_OUT_ROWS:
            break
    return rows


def _held_out_nll(model: Any, rows: Sequence[torch.Tensor]) -> float | None:
    """Mean loss per token in nats; None for no text."""
    with torch.inference_mode():
        losses = [float(_loss(model, row[None])) for row in rows]
    return sum(losses) / len(losses) if losses else None
