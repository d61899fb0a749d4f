"""A real `sglang serve` on a loopback port, for the demo, the benchmarks and the engine tests."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil
import requests

from sglang_kvtc.errors import KVTCError

CPU_FLAGS = ("--device", "cpu", "--attention-backend", "torch_native", "--skip-server-warmup")
START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 20.0
REQUEST_TIMEOUT_S = 300.0


class ServerError(KVTCError):
    """The server did not start, died, or refused a request; the message ends with its last log lines."""


@dataclass(frozen=True, slots=True)
class Generation:
    """Answer to one prompt. Token counts as SGLang reports them.

    logprobs: of the output, empty where none were asked for. arrivals_s: when each token of the output was streamed,
    seconds after the request was sent.
    """

    output_ids: list[int]
    logprobs: list[float]
    prompt_tokens: int
    cached_device: int
    cached_compressed: int
    arrivals_s: list[float]

    @property
    def ttft_s(self) -> float:
        """Seconds to the first streamed token."""
        return self.arrivals_s[0]


@dataclass(frozen=True, slots=True)
class Prediction:
    """Top-1 tokens of a teacher-forced continuation, one per given token."""

    top1: list[int]
    cached_compressed: int


@dataclass(slots=True)
class ServerProcess:
    """Context manager around one server process.

    arguments: everything after `sglang serve`, without host and port. log_path: combined output of the server; a
    temporary file if not given. env: variables set on top of this process's own.
    """

    model_dir: Path
    arguments: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    log_path: Path | None = None
    port: int = 0
    _process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self, timeout_s: float = START_TIMEOUT_S) -> ServerProcess:
        """Start and wait until the server answers. Raises ServerError if it exits or stays silent."""
        self.port = self.port or free_port()
        if self.log_path is None:
            handle, name = tempfile.mkstemp(prefix="sglang-kvtc-", suffix=".log")
            os.close(handle)
            self.log_path = Path(name)
        command = [
            *(str(Path(sys.executable).with_name("sglang")), "serve", "--model-path", str(self.model_dir)),
            *("--host", "127.0.0.1", "--port", str(self.port)),
            *self.arguments,
        ]
        with self.log_path.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **self.env},
                start_new_session=True,
            )
        try:
            return self._wait_ready(timeout_s)
        except BaseException:
            # An interrupt, too: nobody else would end the server.
            self.stop()
            raise

    def _wait_ready(self, timeout_s: float) -> ServerProcess:
        assert self._process is not None
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise ServerError(f"the server exited with status {self._process.returncode}:\n{self.log_tail()}")
            with contextlib.suppress(requests.RequestException):
                if requests.get(f"{self.url}/health", timeout=30).ok:
                    return self
            time.sleep(0.5)
        raise ServerError(f"the server did not answer within {timeout_s:.0f} s:\n{self.log_tail()}")

    def stop(self) -> None:
        """Stop the server and its children by process id. Safe to call twice."""
        if self._process is None:
            return
        with contextlib.suppress(psutil.NoSuchProcess):
            family = psutil.Process(self._process.pid).children(recursive=True)
            self._process.send_signal(signal.SIGTERM)
            _gone, alive = psutil.wait_procs(family, timeout=STOP_TIMEOUT_S)
            for child in alive:
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None

    def __enter__(self) -> ServerProcess:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def log(self) -> str:
        return self.log_path.read_text(errors="replace") if self.log_path else ""

    def log_tail(self, lines: int = 25) -> str:
        return "\n".join(self.log().splitlines()[-lines:])

    def generate(
        self,
        input_ids: Sequence[int],
        max_new_tokens: int = 16,
        extra_key: str | None = None,
        rid: str | None = None,
        custom_params: Mapping[str, object] | None = None,
        with_logprobs: bool = True,
    ) -> Generation:
        """Greedy generation from token ids, streamed so that every token can be timed.

        custom_params: SGLang's parameters of that name, such as `{"kvtc_gated": False}`. with_logprobs: of the output;
        they take time, since SGLang sends all of them again with every token.

        Raises ServerError if the server answers with an error.
        """
        body: dict[str, Any] = {
            "input_ids": list(input_ids),
            "sampling_params": {"temperature": 0, "max_new_tokens": max_new_tokens, "ignore_eos": True},
            "return_logprob": with_logprobs,
            "stream": True,
        }
        if extra_key is not None:
            body["extra_key"] = extra_key
        if rid is not None:
            body["rid"] = rid
        if custom_params is not None:
            body["sampling_params"]["custom_params"] = dict(custom_params)
        started = time.perf_counter()
        arrivals_s: list[float] = []
        last: dict[str, Any] = {}
        with requests.post(f"{self.url}/generate", json=body, stream=True, timeout=REQUEST_TIMEOUT_S) as response:
            if not response.ok:
                raise ServerError(f"the server answered {response.status_code}: {response.text}")
            for line in response.iter_lines():
                if not line.startswith(b"data: ") or line == b"data: [DONE]":
                    continue
                arrived_s = time.perf_counter() - started
                last = json.loads(line[len(b"data: ") :])
                if "error" in last:
                    raise ServerError(f"the server answered: {last['error']}")
                arrivals_s += [arrived_s] * (len(last.get("output_ids", ())) - len(arrivals_s))
        if not last:
            raise ServerError(f"the server sent no tokens:\n{self.log_tail()}")
        meta = last["meta_info"]
        reason = meta.get("finish_reason") or {}
        if reason.get("type") == "abort":
            raise ServerError(f"the request was aborted: {reason.get('message')}")
        cached = meta.get("cached_tokens_details") or {}
        return Generation(
            output_ids=last["output_ids"],
            logprobs=[entry[0] for entry in meta["output_token_logprobs"]] if with_logprobs else [],
            prompt_tokens=meta["prompt_tokens"],
            cached_device=cached.get("device", meta["cached_tokens"]),
            cached_compressed=cached.get("host", 0),
            arrivals_s=arrivals_s,
        )

    def predict(self, prompt: Sequence[int], continuation: Sequence[int]) -> Prediction:
        """Most likely token at each position of `continuation` when the tokens before it are given.

        Raises ServerError if the server answers with an error.
        """
        body = {
            "input_ids": [*prompt, *continuation],
            "sampling_params": {"temperature": 0, "max_new_tokens": 1},
            "return_logprob": True,
            "top_logprobs_num": 1,
            "logprob_start_len": len(prompt) - 1,
        }
        response = requests.post(f"{self.url}/generate", json=body, timeout=REQUEST_TIMEOUT_S)
        if not response.ok:
            raise ServerError(f"the server answered {response.status_code}: {response.text}")
        meta = response.json()["meta_info"]
        # The entry of position p predicts the token at p; the one at the start position has no prediction.
        top = meta["input_top_logprobs"][1 : len(continuation) + 1]
        return Prediction([entry[0][1] for entry in top], meta["cached_tokens_details"].get("host", 0))

    def flush(self, timeout_s: float = 30.0) -> None:
        """Empty every tier. Waits until the server is idle. Raises ServerError if it stays busy."""
        response = requests.post(f"{self.url}/flush_cache", params={"timeout": timeout_s}, timeout=timeout_s + 30)
        if not response.ok:
            raise ServerError(f"flush was refused: {response.text}")

    def abort(self, rid: str) -> None:
        requests.post(f"{self.url}/abort_request", json={"rid": rid}, timeout=30).raise_for_status()

    def scheduler_state(self) -> dict[str, Any]:
        """The scheduler's internal state from `GET /server_info`, with the tier's numbers under `kvtc`."""
        response = requests.get(f"{self.url}/server_info", timeout=60)
        response.raise_for_status()
        state: dict[str, Any] = response.json()["internal_states"][0]
        return state

    def tier_stats(self) -> dict[str, float]:
        """Raises ServerError if the server runs without the tier."""
        state = self.scheduler_state()
        if "kvtc" not in state:
            raise ServerError("the server runs without the compressed tier")
        stats: dict[str, float] = state["kvtc"]
        return stats

    def eviction_stats(self) -> dict[str, float]:
        """Raises ServerError if the server runs without gates."""
        state = self.scheduler_state()
        if "kvtc_eviction" not in state:
            raise ServerError("the server runs without gated eviction")
        stats: dict[str, float] = state["kvtc_eviction"]
        return stats

    def wait_encoded(self, timeout_s: float = 120.0) -> dict[str, float]:
        """Wait until no raw copy waits for the encoder and return the tier's numbers."""
        deadline = time.monotonic() + timeout_s
        while (stats := self.tier_stats())["staged_chunks"]:
            if time.monotonic() > deadline:
                raise ServerError(f"{stats['staged_chunks']} chunks still wait for the encoder after {timeout_s} s")
            time.sleep(0.1)
        return stats

    def wait_compressed(self, num_tokens: int, timeout_s: float = 120.0) -> None:
        """Wait until so many tokens or more are frames and no raw copy waits for the encoder."""
        deadline = time.monotonic() + timeout_s
        while (stats := self.tier_stats())["live_tokens"] < num_tokens or stats["staged_chunks"]:
            if time.monotonic() > deadline:
                raise ServerError(f"{stats['live_tokens']} of {num_tokens} tokens were compressed after {timeout_s} s")
            time.sleep(0.1)


@contextlib.contextmanager
def temporary_server(
    model_dir: Path,
    *flags: str,
    config: str = "",
    artifact: Path | None = None,
    env: Mapping[str, str] | None = None,
) -> Iterator[ServerProcess]:
    """Run a CPU server whose configuration file and log live as long as it does.

    flags: after CPU_FLAGS. config: TOML text of `--kvtc-config`, none if it is empty. artifact: turns the compressed
    tier on. Raises ServerError if the server does not start.
    """
    with tempfile.TemporaryDirectory() as folder:
        ours: list[str] = []
        if artifact is not None:
            ours += ["--enable-kvtc", "--kvtc-artifact", str(artifact)]
        if config:
            path = Path(folder) / "kvtc.toml"
            path.write_text(config, encoding="utf-8")
            ours += ["--kvtc-config", str(path)]
        arguments = [*CPU_FLAGS, *ours, *flags]
        with ServerProcess(model_dir, arguments, env or {}, Path(folder) / "server.log") as server:
            yield server


def free_port() -> int:
    """A loopback port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
