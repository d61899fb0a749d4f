"""What the server refuses at launch, through SGLang's own argument parser and our hooks on it."""

from __future__ import annotations

import argparse
import dataclasses
import re
from pathlib import Path

import pytest
from sglang.srt.plugins import load_plugins
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.server_args import ServerArgs

from sglang_kvtc.artifact.fingerprint import fingerprint_model
from sglang_kvtc.artifact.io import save_artifact
from sglang_kvtc.artifact.shard import SHARD_KEY, shards_of
from sglang_kvtc.calibrate.demo_model import demo_model_dir
from sglang_kvtc.config import CONFIG_ENV, EvictionConfig
from sglang_kvtc.errors import ConfigError, UnsupportedError
from sglang_kvtc.eviction.budget import Scope
from sglang_kvtc.gates.io import save_gates
from sglang_kvtc.gates.model import GateConfig, GateInput, GateKind, new_gates
from sglang_kvtc.integration import compat, gating_hooks
from sglang_kvtc.integration.eviction_options import FIXED_BUDGET_SLOTS, budget_of, slots_per_token
from sglang_kvtc.integration.flags import ENGINE_SETTINGS, config_of
from tests.tier.test_tier import ARTIFACT


@pytest.fixture(scope="module")
def parser() -> argparse.ArgumentParser:
    load_plugins()
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    return parser


@pytest.fixture(scope="module")
def gates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Untrained ones of the demo model's shape."""
    path = tmp_path_factory.mktemp("gates") / "gates.safetensors"
    config = GateConfig(GateKind.SINK_ATTENTION, GateInput.HIDDEN, 30, 576, 3, 3)
    save_gates(path, new_gates(config, seed=0), fingerprint_model(demo_model_dir()), {})
    return path


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("artifact")
    save_artifact(dataclasses.replace(ARTIFACT, fingerprint=fingerprint_model(demo_model_dir())), folder)
    return folder


def launch(parser: argparse.ArgumentParser, *flags: str) -> ServerArgs:
    arguments = ["--model-path", str(demo_model_dir()), "--device", "cpu", *flags]
    return ServerArgs.from_cli_args(parser.parse_args(arguments))


def refusal(parser: argparse.ArgumentParser, *flags: str) -> str:
    with pytest.raises(SystemExit) as stop:
        launch(parser, *flags)
    message = str(stop.value)
    assert message.startswith("sglang-kvtc: ") and "\n" not in message
    return message


def test_a_correct_launch_selects_the_backend_and_carries_the_configuration(
    parser: argparse.ArgumentParser, artifact: Path, tmp_path: Path
) -> None:
    (tmp_path / "kvtc.toml").write_text("[tier]\nmin_node_tokens = 77\n")
    args = launch(
        parser, "--enable-kvtc", "--kvtc-artifact", str(artifact), "--kvtc-config", str(tmp_path / "kvtc.toml")
    )
    assert {name: getattr(args, name) for name in ENGINE_SETTINGS} == ENGINE_SETTINGS
    config = config_of(args)
    assert (config.artifact, config.tier.min_node_tokens) == (str(artifact), 77)


def test_without_the_flag_nothing_changes(parser: argparse.ArgumentParser) -> None:
    args = launch(parser)
    assert args.radix_cache_backend is None and not args.enable_hierarchical_cache


def test_a_missing_artifact_is_refused_with_the_command_that_makes_one(
    parser: argparse.ArgumentParser, tmp_path: Path
) -> None:
    assert "sglang-kvtc calibrate" in refusal(parser, "--enable-kvtc")
    absent = str(tmp_path / "absent")
    message = refusal(parser, "--enable-kvtc", "--kvtc-artifact", absent)
    assert absent in message and "sglang-kvtc calibrate" in message


def test_an_artifact_of_another_checkpoint_is_refused_by_name(parser: argparse.ArgumentParser, tmp_path: Path) -> None:
    save_artifact(ARTIFACT, tmp_path)
    message = refusal(parser, "--enable-kvtc", "--kvtc-artifact", str(tmp_path))
    assert "was made for toy" in message and "calibrate" in message


def test_an_artifact_for_one_rank_of_several_is_refused_by_name(
    parser: argparse.ArgumentParser, tmp_path: Path
) -> None:
    geometry = ARTIFACT.geometry
    shard = shards_of(dataclasses.replace(geometry, num_kv_heads=2 * geometry.num_kv_heads), tp_size=2, pp_size=1)[1]
    fingerprint = fingerprint_model(demo_model_dir())
    provenance = {SHARD_KEY: shard.record()}
    save_artifact(dataclasses.replace(ARTIFACT, fingerprint=fingerprint, provenance=provenance), tmp_path)
    message = refusal(parser, "--enable-kvtc", "--kvtc-artifact", str(tmp_path))
    assert "rank tp1-pp0 of a model that is spread over 2 ranks" in message


def test_a_sec_01_a_pickle_is_no_artifact_and_runs_nothing(parser: argparse.ArgumentParser, tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    (tmp_path / "artifact.safetensors").write_bytes(b"cos\nsystem\n(S'touch " + str(marker).encode() + b"'\ntR.")
    refusal(parser, "--enable-kvtc", "--kvtc-artifact", str(tmp_path))
    assert not marker.exists()


@pytest.mark.parametrize(
    ("toml", "named"),
    [("[tier]\narena_bites = 1\n", "arena_bites"), ("[codec]\nchunk_tokens = 'many'\n", "chunk_tokens"), ("[", "TOML")],
)
def test_a_wrong_configuration_is_refused_by_key(
    parser: argparse.ArgumentParser, artifact: Path, tmp_path: Path, toml: str, named: str
) -> None:
    (tmp_path / "kvtc.toml").write_text(toml)
    flags = ("--enable-kvtc", "--kvtc-artifact", str(artifact), "--kvtc-config", str(tmp_path / "kvtc.toml"))
    message = refusal(parser, *flags)
    assert named in message or "cannot read the configuration" in message


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (("--tp-size", "2"), "tp_size"),
        (("--pp-size", "2"), "pp_size"),
        (("--kv-cache-dtype", "fp8_e4m3"), "kv_cache_dtype"),
        (("--radix-cache-backend", "other"), "--radix-cache-backend other"),
        (("--hicache-storage-backend", "file"), "hicache_storage_backend"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else None,
)
def test_a_side_02_b_ev_22_an_unsupported_setting_is_refused_by_name(
    parser: argparse.ArgumentParser, artifact: Path, flags: tuple[str, ...], named: str
) -> None:
    assert named in refusal(parser, "--enable-kvtc", "--kvtc-artifact", str(artifact), *flags)


def refuse_speculation(args: ServerArgs) -> None:
    class Speculative:
        speculative_algorithm = "EAGLE"

        def __getattr__(self, name: str) -> object:
            return getattr(args, name)

    with pytest.raises(UnsupportedError, match="speculative_algorithm='EAGLE'"):
        compat.check_settings(Speculative(), config_of(args))


def test_a_side_01_speculative_decoding_is_refused(parser: argparse.ArgumentParser, artifact: Path) -> None:
    args = launch(parser, "--enable-kvtc", "--kvtc-artifact", str(artifact))
    for name, accepted, _advice in compat._REFUSED_SETTINGS:
        assert getattr(args, name) in accepted
    refuse_speculation(args)


def test_another_engine_release_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "version", lambda _name: "0.5.24")
    with pytest.raises(UnsupportedError, match=r"SGLang 0\.5\.24 is not supported: install sglang==0\.5\.23"):
        compat.check_engine_version()


def test_flags_of_the_tier_without_the_tier_are_refused(parser: argparse.ArgumentParser) -> None:
    assert "needs --enable-kvtc" in refusal(parser, "--kvtc-artifact", "somewhere")
    assert "needs --kvtc-gates" in refusal(parser, "--kvtc-keep", "0.5")


def test_a_ops_08_a_scheduler_without_our_configuration_refuses_to_run(
    parser: argparse.ArgumentParser, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(CONFIG_ENV, raising=False)
    with pytest.raises(ConfigError, match="no configuration reached the scheduler"):
        config_of(launch(parser))


def test_the_engine_takes_its_configuration_from_the_environment(
    parser: argparse.ArgumentParser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "kvtc.toml").write_text('artifact = "here"\n')
    monkeypatch.setenv(CONFIG_ENV, str(tmp_path / "kvtc.toml"))
    assert config_of(launch(parser)).artifact == "here"


GATED = ("--device", "cpu", "--attention-backend", "torch_native")


def test_gates_and_share_reach_the_scheduler(parser: argparse.ArgumentParser, gates: Path, tmp_path: Path) -> None:
    (tmp_path / "kvtc.toml").write_text("[eviction.budget]\nkeep_tokens = 900\nscope = 'layer'\n")
    flags = ("--kvtc-gates", str(gates), "--kvtc-keep", "0.3", "--kvtc-config", str(tmp_path / "kvtc.toml"))
    args = launch(parser, *GATED, *flags)
    assert args.radix_cache_backend is None
    budget = budget_of(config_of(args).eviction)
    assert (budget.keep_fraction, budget.keep_tokens, budget.scope) == (0.3, None, Scope.LAYER)


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (("--attention-backend", "triton"), "attention_backend='triton'"),
        (("--decode-attention-backend", "triton"), "decode_attention_backend='triton'"),
        (("--page-size", "16"), "page_size=16"),
        (("--enable-hierarchical-cache",), "use --enable-kvtc instead"),
        (("--tp-size", "2"), "tp_size=2"),
        (("--kv-cache-dtype", "fp8_e4m3"), "kv_cache_dtype"),
        (("--enable-streaming-session",), "enable_streaming_session"),
        (("--disaggregation-mode", "prefill"), "disaggregation_mode='prefill'"),
        (("--kvtc-keep", "0.1"), "allow_extreme"),
        (("--kvtc-keep", "1.5"), "keep_fraction"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else None,
)
def test_b_ev_22_what_gating_cannot_serve_is_refused_by_name(
    parser: argparse.ArgumentParser, gates: Path, flags: tuple[str, ...], named: str
) -> None:
    assert named in refusal(parser, *GATED, "--kvtc-gates", str(gates), *flags)


def test_b_ev_15_speculative_decoding_with_gates_is_refused(parser: argparse.ArgumentParser, gates: Path) -> None:
    args = launch(parser, *GATED, "--kvtc-gates", str(gates))
    refuse_speculation(args)


def test_b_ev_19_evicting_nearly_everything_needs_an_explicit_override(
    parser: argparse.ArgumentParser, gates: Path, tmp_path: Path
) -> None:
    (tmp_path / "kvtc.toml").write_text("[eviction.budget]\nkeep_fraction = 0.1\nallow_extreme = true\n")
    args = launch(parser, *GATED, "--kvtc-gates", str(gates), "--kvtc-config", str(tmp_path / "kvtc.toml"))
    assert budget_of(config_of(args).eviction).keep_fraction == 0.1


def test_gates_of_another_checkpoint_or_none_are_refused_by_name(
    parser: argparse.ArgumentParser, tmp_path: Path
) -> None:
    config = GateConfig(GateKind.SINK_ATTENTION, GateInput.HIDDEN, 30, 576, 3, 3)
    other = tmp_path / "other.safetensors"
    save_gates(other, new_gates(config, seed=0), ARTIFACT.fingerprint, {})
    assert "toy" in refusal(parser, *GATED, "--kvtc-gates", str(other))
    assert "absent" in refusal(parser, *GATED, "--kvtc-gates", str(tmp_path / "absent.safetensors"))


def test_gates_that_are_fed_keys_are_refused(parser: argparse.ArgumentParser, tmp_path: Path) -> None:
    config = GateConfig(GateKind.LINEAR, GateInput.KEYS, 30, 192, 3, 3)
    path = tmp_path / "keys.safetensors"
    save_gates(path, new_gates(config, seed=0), fingerprint_model(demo_model_dir()), {})
    assert "--input hidden" in refusal(parser, *GATED, "--kvtc-gates", str(path))


def test_a_configuration_that_turns_nothing_on_is_refused(parser: argparse.ArgumentParser, tmp_path: Path) -> None:
    (tmp_path / "kvtc.toml").write_text("")
    assert "turns nothing on" in refusal(parser, "--kvtc-config", str(tmp_path / "kvtc.toml"))


def test_hooks_that_did_not_apply_are_named(monkeypatch: pytest.MonkeyPatch, parser: argparse.ArgumentParser) -> None:
    gating_hooks.check_hooks()
    target = next(iter(gating_hooks.HOOKS))
    monkeypatch.setattr(HookRegistry, "_patched", HookRegistry._patched - {target})
    with pytest.raises(UnsupportedError, match=re.escape(target)):
        gating_hooks.check_hooks()


def test_slots_follow_from_the_budget() -> None:
    def slots(**budget: object) -> int:
        return slots_per_token(EvictionConfig(gates="g", budget=budget))

    assert (slots(keep_fraction=0.3), slots(keep_fraction=1.0), slots(keep_mass=0.5)) == (4, 1, 5)
    assert slots(keep_tokens=100) == FIXED_BUDGET_SLOTS
    assert slots_per_token(EvictionConfig(gates="g", slots_per_token=3)) == 3
