"""What the server refuses at launch, through SGLang's own argument parser and our hooks on it."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

import pytest
from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import ServerArgs

from sglang_kvtc.artifact.fingerprint import fingerprint_model
from sglang_kvtc.artifact.io import save_artifact
from sglang_kvtc.calibrate.demo_model import demo_model_dir
from sglang_kvtc.config import CONFIG_ENV
from sglang_kvtc.errors import ConfigError, UnsupportedError
from sglang_kvtc.integration import compat
from sglang_kvtc.integration.flags import ENGINE_SETTINGS, config_of
from tests.tier.test_tier import ARTIFACT


@pytest.fixture(scope="module")
def parser() -> argparse.ArgumentParser:
    load_plugins()
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    return parser


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


def test_a_side_01_speculative_decoding_is_refused(parser: argparse.ArgumentParser, artifact: Path) -> None:
    args = launch(parser, "--enable-kvtc", "--kvtc-artifact", str(artifact))
    for name, accepted, _advice in compat._REFUSED_SETTINGS:
        assert getattr(args, name) in accepted

    class Speculative:
        speculative_algorithm = "EAGLE"

        def __getattr__(self, name: str) -> object:
            return getattr(args, name)

    with pytest.raises(UnsupportedError, match="speculative_algorithm='EAGLE'"):
        compat.check_settings(Speculative())


def test_another_engine_release_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "version", lambda _name: "0.5.24")
    with pytest.raises(UnsupportedError, match=r"SGLang 0\.5\.24 is not supported: install sglang==0\.5\.23"):
        compat.check_engine_version()


def test_flags_of_the_tier_without_the_tier_are_refused(parser: argparse.ArgumentParser) -> None:
    assert "need --enable-kvtc" in refusal(parser, "--kvtc-artifact", "somewhere")


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
