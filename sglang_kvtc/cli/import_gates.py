"""`sglang-kvtc import-gates`: convert a published gate checkpoint to a gate file for one model."""

from __future__ import annotations

import argparse
from pathlib import Path

import xxhash

from sglang_kvtc import __version__
from sglang_kvtc.artifact.fingerprint import fingerprint_model
from sglang_kvtc.calibrate.causal_lm import load_config, model_geometry
from sglang_kvtc.gates.checkpoint import load_released
from sglang_kvtc.gates.io import save_gates
from sglang_kvtc.gates.model import GateShape


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT.pt", help="published gates of Fast KVzip")
    parser.add_argument("--model", type=Path, required=True, metavar="DIR", help="Hugging Face directory of the model")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="the .safetensors file to write")


def run(args: argparse.Namespace) -> int:
    """Convert and print one description. Raises ArtifactError, by name, for gates that do not fit the model."""
    config = load_config(args.model)
    geometry = model_geometry(config)
    shape = GateShape(
        geometry.num_layers,
        config.hidden_size,
        geometry.num_kv_heads,
        config.num_attention_heads // geometry.num_kv_heads,
    )
    gates = load_released(args.checkpoint, shape)
    checksum = xxhash.xxh3_128()
    with args.checkpoint.open("rb") as file:
        while block := file.read(1 << 20):
            checksum.update(block)
    provenance = {
        "source": args.checkpoint.name,
        "source_xxh3_128": checksum.hexdigest(),
        "imported_by": f"sglang-kvtc {__version__}",
    }
    written = save_gates(args.out, gates, fingerprint_model(args.model), provenance)
    found = written.gates.config
    print(
        f"gates of {found.num_layers} layers for {found.num_kv_heads} KV heads of {found.group_size} query heads, "
        f"{found.input_features} features in, {found.gate_dim} channels, {found.num_sinks} sinks"
    )
    print(f"for {written.fingerprint.name} ({written.fingerprint.digest}), digest {written.digest.hex()}")
    print(f"written to {args.out}")
    return 0
