"""Entry point of `sglang-kvtc`. The module of a command is imported only when that command runs.

A command module has `add_arguments(parser)` and `run(args) -> int`. Exit codes of every command: 0 done, 1 the check
or run failed, 2 bad usage.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import logging
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sglang_kvtc import __version__
from sglang_kvtc.errors import KVTCError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Command:
    """One row of the command table. `extra` is the optional dependency set that the command's module needs."""

    module: str
    help: str
    extra: str


COMMANDS = {
    "calibrate": Command("sglang_kvtc.cli.calibrate", "fit a model's artifact: bases and bit plans", "calibrate"),
    "train-gates": Command("sglang_kvtc.cli.train_gates", "distil a model's gates for KV eviction", "calibrate"),
    "import-gates": Command("sglang_kvtc.cli.import_gates", "convert published gates to safetensors", "calibrate"),
    "inspect": Command("sglang_kvtc.cli.inspect", "describe and verify an artifact or a frame", "calibrate"),
    "plot": Command("sglang_kvtc.cli.plot", "draw an artifact and benchmark records", "calibrate"),
    "bench": Command("sglang_kvtc.cli.bench", "measure quality, allocation, codec or restore", "bench"),
    "demo": Command("sglang_kvtc.cli.demo", "serve a small model and restore a prefix, end to end", "demo"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: the process's own) and return the exit code.

    A KVTCError is one sentence on standard error; `-v` adds the traceback. Raises SystemExit(2) on bad usage and
    SystemExit(0) after `--help` and `--version`, as argparse does.
    """
    options = _parser().parse_args(argv)
    command = COMMANDS[options.command]
    try:
        module = importlib.import_module(command.module)
        parser = argparse.ArgumentParser(prog=f"sglang-kvtc {options.command}", description=command.help)
        _add_verbose(parser)
        module.add_arguments(parser)
        args = parser.parse_args(options.arguments)
        args.verbose = options.verbose or args.verbose
        _set_up_logging(args.verbose)
        with _interrupted_by_sigterm():
            return int(module.run(args))
    except KVTCError as error:
        return _fail(str(error), error)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "sglang_kvtc":
            raise
        return _fail(
            f"{options.command} needs the package {error.name}: pip install 'sglang-kvtc[{command.extra}]'", error
        )
    except KeyboardInterrupt:
        print("sglang-kvtc: interrupted", file=sys.stderr)
        return 1


@contextlib.contextmanager
def _interrupted_by_sigterm() -> Iterator[None]:
    """Let SIGTERM unwind as Ctrl-C does, so that a command stops the servers it has started."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _parser() -> argparse.ArgumentParser:
    width = max(map(len, COMMANDS))
    listing = "\n".join(f"  {name:{width}}  {command.help}" for name, command in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="sglang-kvtc",
        usage="sglang-kvtc [-h] [--version] [-v] COMMAND ...",
        description="KV-cache transform coding for SGLang.",
        epilog=f"commands:\n{listing}\n\n`sglang-kvtc COMMAND --help` lists the options of one.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"sglang-kvtc {__version__}")
    _add_verbose(parser)
    # The options of a command belong to a parser of its own, which exists once its module is imported.
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND", help="one of the commands below")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


def _add_verbose(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-v", "--verbose", action="store_true", help="log details, and tracebacks of errors")


def _set_up_logging(verbose: bool) -> None:
    logging.basicConfig(
        level=logging.INFO if verbose else logging.WARNING, format="%(levelname)s %(name)s: %(message)s"
    )
    logging.getLogger("sglang_kvtc").setLevel(logging.DEBUG if verbose else logging.INFO)


def _fail(sentence: str, error: Exception) -> int:
    print(f"sglang-kvtc: {sentence}", file=sys.stderr)
    logger.debug("traceback of the error above", exc_info=error)
    return 1
