"""kvpress's own methods and its own way of evicting, on the same tokens, as a reference that is none of our code.

kvpress (NVIDIA, Apache-2.0) is not installed with this package, since it pins other versions of its dependencies. It
drops pairs from the cache, or overwrites their keys with ones that no query attends to.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import importlib.metadata
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from sglang_kvtc.benchmarks.eviction import Respond
from sglang_kvtc.calibrate.attention_hook import attention_modules
from sglang_kvtc.errors import ConfigError, UnsupportedError
from sglang_kvtc.gates.checkpoint import RELEASED_NAMES
from sglang_kvtc.gates.model import BiasForm, GateInput, Gates, SinkAttentionGates

INSTALL = "pip install --no-deps kvpress==0.5.5 'cachetools<6' 'fire<0.7' termcolor"
EXPECTED_ATTENTION_FLOOR = 1e-2


class OutsidePresses:
    """The presses of an installed kvpress for one model. Between calls the model is as it was."""

    def __init__(self, model: Any, gates: Gates) -> None:
        """gates: for kvpress's Fast KVzip, which takes the released form on hidden states alone.

        Raises ConfigError when kvpress cannot be imported, UnsupportedError for other gates.
        """
        try:
            self._kvpress = importlib.import_module("kvpress")
            self._new_cache = importlib.import_module("kvpress.pipeline").DynamicCache
            self._patch = importlib.import_module("kvpress.attention_patch")
            gate_class = importlib.import_module("kvpress.presses.fastkvzip_press").FastKVzipGate
        except ImportError as error:
            raise ConfigError(f"--kvpress: kvpress cannot be imported ({error}): {INSTALL}") from error
        self._model = model
        self._implementation = model.config._attn_implementation
        # Importing kvpress wraps every attention function of transformers, ours included, for good. Here only the
        # model's own is wrapped, and only while kvpress needs it.
        functions = self._patch.ALL_ATTENTION_FUNCTIONS
        for name in list(functions):
            with contextlib.suppress(KeyError):
                del functions[name]
        self._gates = _their_gates(gates, gate_class)
        prefix = f"kvpress {importlib.metadata.version('kvpress')}"
        presses = self._kvpress
        self._presses: dict[str, Callable[[float], Any]] = {
            f"{prefix} KVzip": self._kvzip,
            f"{prefix} FastKVzip, our gates": self._fast_kvzip,
            f"{prefix} SnapKV": lambda keep: presses.SnapKVPress(_ratio(keep)),
            f"{prefix} StreamingLLM": lambda keep: presses.StreamingLLMPress(_ratio(keep)),
            f"{prefix} AdaKV, expected attention": lambda keep: presses.AdaKVPress(
                presses.ExpectedAttentionPress(_ratio(keep), epsilon=EXPECTED_ATTENTION_FLOOR)
            ),
            f"{prefix} KeyDiff": lambda keep: presses.KeyDiffPress(_ratio(keep)),
            f"{prefix} Knorm": lambda keep: presses.KnormPress(_ratio(keep)),
        }

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the presses, with kvpress's version."""
        return tuple(self._presses)

    def evict(self, name: str, keep: float, token_ids: Sequence[int]) -> Respond:
        """Prefill a context under a press that keeps the share `keep` of its pairs; the result continues it."""
        press = self._presses[name](keep)
        cache = self._new_cache(config=self._model.config)
        modules = attention_modules(self._model)
        positions = torch.arange(len(token_ids), device=self._model.device)
        input_ids = torch.tensor([list(token_ids)], device=self._model.device)
        with torch.inference_mode(), self._patched(), press(self._model):
            # transformers no longer hands `cache_position` to attention, where kvpress 0.5.5 looks for it.
            self._model.base_model(input_ids=input_ids, past_key_values=cache, use_cache=True, cache_position=positions)
        masked = [vars(module).pop("masked_key_indices", None) for module in modules]

        def respond(continuation_ids: Sequence[int]) -> torch.Tensor:
            start = len(token_ids)
            input_ids = torch.tensor([list(continuation_ids)], device=self._model.device)
            positions = torch.arange(start, start + len(continuation_ids), device=self._model.device)
            try:
                for module, indices in zip(modules, masked, strict=True):
                    module.masked_key_indices = indices
                with torch.inference_mode(), self._patched():
                    output = self._model(
                        input_ids=input_ids,
                        position_ids=positions[None],
                        past_key_values=copy.deepcopy(cache),
                        use_cache=True,
                    )
            finally:
                for module in modules:
                    vars(module).pop("masked_key_indices", None)
            log_probs: torch.Tensor = output.logits[0].float().log_softmax(dim=-1)
            return log_probs

        return respond

    def _kvzip(self, keep: float) -> Any:
        base = self._kvpress.KVzipPress

        def prepare(press: Any, *args: Any, **kwargs: Any) -> Any:
            # It takes the first tokens for those of a chat template and leaves them out; here all are text.
            press.prefix_length = 0
            return base.prepare(press, *args, **kwargs)

        return type("PlainTextKVzipPress", (base,), {"prepare": prepare})(compression_ratio=1 - keep)

    def _fast_kvzip(self, keep: float) -> Any:
        press = self._kvpress.FastKVzipPress(compression_ratio=1 - keep)
        press.gates = self._gates
        return press

    @contextlib.contextmanager
    def _patched(self) -> Iterator[None]:
        """Let the model's attention function heed `masked_key_indices`."""
        functions = self._patch.ALL_ATTENTION_FUNCTIONS
        functions[self._implementation] = self._patch.attention_patch(functions[self._implementation])
        try:
            yield
        finally:
            del functions[self._implementation]


def _ratio(keep: float) -> float:
    """Compression ratio of which kvpress's int(num_tokens * (1 - ratio)) is no token short, as it is of 1 - 0.2."""
    return max(0.0, 1 - keep - 1e-9)


def _their_gates(gates: Gates, gate_class: Any) -> list[torch.nn.Module]:
    """Our gates as kvpress's modules. Raises UnsupportedError for gates that its presses cannot use."""
    config = gates.config
    if (
        not isinstance(gates, SinkAttentionGates)
        or config.bias_form is not BiasForm.RELEASED
        or config.input is not GateInput.HIDDEN
        or not config.num_sinks
    ):
        raise UnsupportedError(
            f"--kvpress: its gates are sink attention in the released form on hidden states, these are {config.kind} "
            f"({config.bias_form}, {config.num_sinks} sinks) on {config.input}"
        )
    return published_gates(gates, gate_class)


def published_gates(gates: Gates, gate_class: Any) -> list[torch.nn.Module]:
    """Sink-attention gates in the released form as modules of the published gate class, one per layer."""
    config = gates.config
    parameters = dict(gates.named_parameters())
    modules = []
    for layer in range(config.num_layers):
        module: torch.nn.Module = gate_class(
            layer,
            config.input_features,
            config.num_kv_heads,
            config.group_size,
            torch.float32,
            config.gate_dim,
            config.num_sinks,
        )
        weights = {name: parameters[ours].detach()[layer] for name, ours in RELEASED_NAMES.items()}
        weights |= {name: weights[name].unsqueeze(1) for name in ("k_base", "b")}
        module.load_state_dict(weights)
        modules.append(module.requires_grad_(False))
    return modules
