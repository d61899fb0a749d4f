"""One real server per module, on a loopback port, with the fault plugin loaded and strict memory checks on."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from sglang_kvtc.artifact.fingerprint import fingerprint_model
from sglang_kvtc.benchmarks.prompts import builtin_prompts
from sglang_kvtc.calibrate.demo_artifact import demo_artifact
from sglang_kvtc.calibrate.demo_model import demo_model_dir
from sglang_kvtc.cli.progress import TerminalProgress
from sglang_kvtc.cli.server_process import CPU_FLAGS, Generation, ServerProcess
from sglang_kvtc.gates.io import save_gates
from sglang_kvtc.gates.model import GateConfig, GateInput, GateKind, new_gates

FAULTS = Path(__file__).parent / "faults"
POOL_TOKENS = 1280


@dataclass(slots=True)
class Server:
    """A running server and the handles the tests need."""

    process: ServerProcess
    fault_file: Path
    prompts: Sequence[list[int]]

    def generate(self, prompt: Sequence[int], max_new_tokens: int = 8, extra_key: str | None = None) -> Generation:
        return self.process.generate(prompt, max_new_tokens, extra_key)

    def push_out(self, first_filler: int, count: int = 3) -> None:
        """Fill the device pool with other prompts, so that everything older is compressed, and wait for the encoder."""
        for filler in self.prompts[first_filler : first_filler + count]:
            self.generate(filler, max_new_tokens=1)
        self.process.wait_encoded()

    def set_faults(self, commands: str) -> None:
        self.fault_file.write_text(commands)


@pytest.fixture(scope="session")
def demo_model() -> Path:
    return demo_model_dir()


@pytest.fixture(scope="session")
def artifact() -> Path:
    return demo_artifact(TerminalProgress())


@pytest.fixture(scope="session")
def gates(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Untrained gates: what they keep makes no sense, but differs from head to head."""
    path = tmp_path_factory.mktemp("gates") / "gates.safetensors"
    config = GateConfig(GateKind.SINK_ATTENTION, GateInput.HIDDEN, 30, 576, 3, 3, gate_dim=8)
    made = new_gates(config, seed=0)
    for name in ("sinks", "bias"):
        torch.nn.init.normal_(made.get_parameter(name), generator=torch.Generator().manual_seed(1))
    save_gates(path, made, fingerprint_model(demo_model), {})
    return path


@pytest.fixture(scope="session")
def prompts(demo_model: Path) -> Sequence[list[int]]:
    return builtin_prompts(demo_model, count=23, num_tokens=500)


@pytest.fixture(scope="module")
def start_server(
    demo_model: Path, tmp_path_factory: pytest.TempPathFactory, prompts: Sequence[list[int]]
) -> Iterator[Callable[..., Server]]:
    """Starts servers that live until the module ends: start_server(artifact, config_toml, *flags, tree_core, env).

    Without an artifact the tier is off; without a configuration, too, the server is stock unless flags say otherwise.
    """
    running: list[ServerProcess] = []

    def start(
        artifact: Path | None, config: str, *flags: str, tree_core: str = "rust", env: Mapping[str, str] | None = None
    ) -> Server:
        folder = tmp_path_factory.mktemp("server")
        ours: list[str] = []
        if artifact is not None:
            ours += ["--enable-kvtc", "--kvtc-artifact", str(artifact)]
        if config:
            (folder / "kvtc.toml").write_text(config)
            ours += ["--kvtc-config", str(folder / "kvtc.toml")]
        process = ServerProcess(
            demo_model,
            [
                *CPU_FLAGS,
                *("--max-total-tokens", str(POOL_TOKENS), "--max-running-requests", "8"),
                *("--chunked-prefill-size", "384", "--random-seed", "1"),
                *ours,
                *flags,
            ],
            env={
                "PYTHONPATH": os.pathsep.join([str(FAULTS), *filter(None, [os.environ.get("PYTHONPATH")])]),
                "KVTC_FAULTS": str(folder / "faults"),
                "SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND": tree_core,
                "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
                **(env or {}),
            },
            log_path=folder / "server.log",
        )
        running.append(process)
        process.start()
        return Server(process, folder / "faults", prompts)

    yield start
    for process in running:
        process.stop()
