"""`sglang-kvtc bench ROUTINE`: run one benchmark routine, print its rows, and record where they come from."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path

import psutil

from sglang_kvtc import __version__
from sglang_kvtc.benchmarks.registry import ROUTINES, Routine, load
from sglang_kvtc.errors import ConfigError

Row = dict[str, object]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The routine's own options are parsed in `run`, once it is known which routine it is."""
    parser.usage = "sglang-kvtc bench [-h] [-v] ROUTINE [--json FILE] [options of the routine]"
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = "`sglang-kvtc bench ROUTINE --help` says what a routine measures and lists its options."
    parser.add_argument("routine", choices=ROUTINES, metavar="ROUTINE", help=", ".join(ROUTINES))
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> int:
    """Run the routine. Whatever KVTCError it raises ends the command with exit code 1."""
    routine = load(args.routine)
    options = _routine_parser(args.routine, routine).parse_args(args.arguments)
    json_path: Path | None = options.json
    if json_path is not None and not json_path.parent.is_dir():
        raise ConfigError(f"--json {json_path}: the directory {json_path.parent} does not exist")
    command = shlex.join(["sglang-kvtc", "bench", args.routine, *args.arguments])
    rows = routine.run(options)
    print(format_table(rows))
    print(f"reproduce: {command}")
    if json_path is not None:
        record = {
            "routine": args.routine,
            "command": command,
            "commit": commit(),
            "versions": versions(),
            "machine": machine(),
            "rows": rows,
        }
        json_path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    return 0


def _routine_parser(name: str, routine: Routine) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"sglang-kvtc bench {name}", description=routine.HELP)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write rows, versions and machine to FILE")
    routine.add_arguments(parser)
    return parser


def format_table(rows: Sequence[Row]) -> str:
    """Align `rows` under their keys, in the order in which keys first appear; numbers to the right."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    cells = [columns, *([_cell(row.get(column, "")) for column in columns] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    numeric = [any(isinstance(row.get(column), int | float) for row in rows) for column in columns]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(line, widths, numeric, strict=True)
        ).rstrip()
        for line in cells
    )


def _cell(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def commit() -> str:
    """Which code ran: the checkout's commit (with `-dirty` for local changes), the commit pip installed, or unknown."""
    checkout = Path(__file__).resolve().parents[2]
    if (checkout / ".git").exists():
        describe = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
        result = subprocess.run(describe, cwd=checkout, capture_output=True, text=True, check=False)
        if result.returncode == 0:
            return result.stdout.strip()
    try:
        origin = importlib.metadata.distribution("sglang-kvtc").read_text("direct_url.json")
    except importlib.metadata.PackageNotFoundError:
        origin = None
    vcs: dict[str, str] = json.loads(origin or "{}").get("vcs_info", {})
    return vcs.get("commit_id", "unknown")


def versions() -> dict[str, str]:
    """Versions of what the numbers depend on; packages that are not installed are left out."""
    found = {"python": platform.python_version(), "sglang_kvtc": __version__}
    for name in ("torch", "numpy", "sglang", "transformers"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def machine() -> dict[str, object]:
    """CPU model, usable cores, memory in bytes, and the name of the first accelerator (None without one)."""
    import torch  # here, since `bench --help` needs none of it

    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": psutil.virtual_memory().total,
        "accelerator": torch.cuda.get_device_name(0) if torch.cuda.is_available() else None,
    }


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
