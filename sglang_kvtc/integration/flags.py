"""Command-line flags of `sglang serve` and how the configuration reaches the scheduler.

`ServerArgs` is pickled to every process together with attributes whose name starts with an underscore, so the
validated configuration travels as one such attribute. `sglang.Engine` takes no extra arguments: there the environment
variable `SGLANG_KVTC_CONFIG` names the TOML file.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from typing import Any

import msgspec

from sglang_kvtc.config import CONFIG_ENV, KVTCConfig, from_table, from_toml
from sglang_kvtc.errors import ConfigError, KVTCError

BACKEND = "kvtc"
ADD_FLAGS_TARGET = "sglang.srt.server_args.ServerArgs.add_cli_args"
READ_FLAGS_TARGET = "sglang.srt.server_args.ServerArgs.from_cli_args"

ENGINE_SETTINGS: dict[str, Any] = {
    "radix_cache_backend": BACKEND,
    # SGLang drives load-backs and acknowledgements only for a hierarchical cache.
    "enable_hierarchical_cache": True,
    "hicache_write_policy": "write_back",
    # Keeps SGLang from sizing a host pool by itself; ours hands out ids and allocates frames only.
    "hicache_ratio": 2.0,
}
"""ServerArgs fields that the tier needs. `--enable-kvtc` sets them; for `sglang.Engine` they are arguments."""

BUDGET_SIZES = ("keep_fraction", "keep_tokens", "keep_mass")
"""Fields of a budget of which exactly one is set."""

_CONFIG_ATTRIBUTE = "_kvtc_config"


class _EnableKVTC(argparse.Action):
    """Selects the backend by name in the same step that accepts the flag, so that the flag can never be inert."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        namespace.enable_kvtc = True
        for name, value in ENGINE_SETTINGS.items():
            setattr(namespace, name, value)


def add_flags(_result: object, parser: argparse.ArgumentParser) -> None:
    """AFTER hook on `ServerArgs.add_cli_args(parser)`."""
    group = parser.add_argument_group("sglang-kvtc", "compressed prefixes, and eviction inside running requests")
    group.add_argument(
        "--enable-kvtc",
        action=_EnableKVTC,
        nargs=0,
        default=False,
        help="keep stale prefixes as compressed bitstreams and restore them on a hit",
    )
    group.add_argument("--kvtc-artifact", default=None, help="artifact written by `sglang-kvtc calibrate`")
    group.add_argument(
        "--kvtc-gates", default=None, help="evict from running requests by these gates, of `sglang-kvtc train-gates`"
    )
    group.add_argument(
        "--kvtc-keep", type=float, default=None, help="share of a request's KV pairs that stays (default 0.5)"
    )
    group.add_argument("--kvtc-config", default=None, help="TOML file with [codec], [tier] and [eviction] tables")


def attach_config(server_args: Any, _cls: type, args: argparse.Namespace) -> None:
    """AFTER hook on `ServerArgs.from_cli_args(args)`: validates everything that is known before weights load.

    Ends the launch with one sentence (exit status 1) when something is wrong or unsupported.
    """
    if not (args.enable_kvtc or args.kvtc_artifact or args.kvtc_gates or args.kvtc_keep or args.kvtc_config):
        return
    from sglang_kvtc.integration.compat import check_launch

    try:
        config = _configuration(args)
        if args.enable_kvtc and server_args.radix_cache_backend != BACKEND:
            raise ConfigError(f"--enable-kvtc excludes --radix-cache-backend {server_args.radix_cache_backend}")
        if not args.enable_kvtc and args.kvtc_artifact:
            raise ConfigError("--kvtc-artifact needs --enable-kvtc")
        if not config.eviction.gates and args.kvtc_keep is not None:
            raise ConfigError("--kvtc-keep needs --kvtc-gates")
        if not (args.enable_kvtc or config.eviction.gates):
            raise ConfigError("--kvtc-config alone turns nothing on: add --enable-kvtc, --kvtc-gates or both")
        check_launch(server_args, config)
    except KVTCError as error:
        raise SystemExit(f"sglang-kvtc: {error}") from error
    setattr(server_args, _CONFIG_ATTRIBUTE, msgspec.to_builtins(config))


def _configuration(args: argparse.Namespace) -> KVTCConfig:
    """File first, then the flags that stand for single keys of it."""
    config = from_toml(args.kvtc_config) if args.kvtc_config else KVTCConfig()
    if args.kvtc_artifact:
        config = msgspec.structs.replace(config, artifact=args.kvtc_artifact)
    eviction = config.eviction
    if args.kvtc_gates:
        eviction = msgspec.structs.replace(eviction, gates=args.kvtc_gates)
    if args.kvtc_keep is not None:
        others = {name: value for name, value in eviction.budget.items() if name not in BUDGET_SIZES}
        eviction = msgspec.structs.replace(eviction, budget={**others, "keep_fraction": args.kvtc_keep})
    return msgspec.structs.replace(config, eviction=eviction)


def gating_is_on(server_args: Any) -> bool:
    """Whether this server evicts from running requests. False also where no configuration arrived."""
    if getattr(server_args, _CONFIG_ATTRIBUTE, None) is None and not os.environ.get(CONFIG_ENV):
        return False
    return bool(config_of(server_args).eviction.gates)


def config_of(server_args: Any) -> KVTCConfig:
    """The configuration of this server, in any of its processes.

    Raises ConfigError if none arrived: then a hook was not applied, or `sglang.Engine` runs without the variable.
    """
    table = getattr(server_args, _CONFIG_ATTRIBUTE, None)
    if table is not None:
        return from_table(table, "configuration of the launcher")
    path = os.environ.get(CONFIG_ENV)
    if path:
        return from_toml(path)
    raise ConfigError(
        f"the kvtc backend was selected but no configuration reached the scheduler: start with --enable-kvtc, or set "
        f"{CONFIG_ENV} to a TOML file when using sglang.Engine"
    )
