"""`sglang-kvtc calibrate` and `inspect`, as a user types them."""

import math
import re
from pathlib import Path

import pytest

from sglang_kvtc.artifact.io import load_artifact
from sglang_kvtc.bitstream.header import FrameKind
from sglang_kvtc.calibrate.causal_lm import load_model, prefill
from sglang_kvtc.cli.main import main
from sglang_kvtc.codec.codec import KVCodec
from sglang_kvtc.config import CodecConfig


@pytest.fixture(scope="module")
def artifact_dir(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("artifact")
    assert main([*calibrate_command(tiny_llama, out), "--ratio", "2,4"]) == 0
    return out


def calibrate_command(model_dir: Path, out: Path) -> list[str]:
    sizes = ["--tokens", "2000", "--max-length", "128", "--max-error", "1"]
    return ["calibrate", "--model", str(model_dir), "--out", str(out), *sizes]


def test_calibrate_writes_an_artifact_and_prints_its_summary(
    tiny_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*calibrate_command(tiny_llama, tmp_path), "--ratio", "4", "--threads", "1"]) == 0
    artifact = load_artifact(tmp_path)
    output = capsys.readouterr()
    assert artifact.digest.hex() in output.out
    assert "target ratio 4" in output.out
    assert "held-out text at target ratio 4" in output.out
    assert str(tmp_path) in output.out


def test_progress_outside_a_terminal_is_plain_lines_with_units(
    tiny_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*calibrate_command(tiny_llama, tmp_path), "--ratio", "4"]) == 0
    error = capsys.readouterr().err
    for stage in ("forward passes: 2,000 tokens", "K: eigendecomposition: 1 matrices", "K and V: step: 16 trials"):
        assert any(line.startswith(stage) for line in error.split("\n")), stage
    assert "\r" not in error


def test_inspect_shows_geometry_rope_provenance_and_every_plan(
    artifact_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert main(["inspect", str(artifact_dir)]) == 0
    text = capsys.readouterr().out
    artifact = load_artifact(artifact_dir)
    for expected in (
        "2 layers, 2 KV heads, head size 32",
        "bfloat16, 512 bytes per token",
        "default, 32 rotary channels, NeoX pairs",
        artifact.fingerprint.digest,
        "corpus           builtin",
        "domain           builtin prose: ",
        "of them in long sequences",
    ):
        assert expected in text
    for plan in artifact.plans:
        size = math.ceil((plan.k.planned_bits + plan.v.planned_bits) / 8)
        assert (
            f"target ratio {plan.target_ratio:g}: {size:,} bytes per token after entropy coding of the sample" in text
        )
        for name, side in (("K", plan.k), ("V", plan.v)):
            assert f"{name}: {len(side.columns):,} components in {len(side.groups)} groups" in text
            counts = [int(count) for count in re.findall(r"(\d+) x \d+ at \d+ bits", text)]
            assert len(side.groups) <= sum(counts)


def test_ranks_are_written_to_folders_of_their_own(
    tiny_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*calibrate_command(tiny_llama, tmp_path), "--ratio", "4", "--tp", "2"]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tp0-pp0", "tp1-pp0"]
    capsys.readouterr()
    assert main(["inspect", str(tmp_path / "tp1-pp0")]) == 0
    assert "tp rank 1 of 2, pp rank 0 of 1: layers 0 to 1, KV heads 1 to 1" in capsys.readouterr().out


def test_a_dry_run_needs_no_weights_and_writes_nothing(
    tiny_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text((tiny_llama / "config.json").read_text())
    assert main(["calibrate", "--model", str(tmp_path), "--dry-run"]) == 0
    text = capsys.readouterr().out
    for expected in ("128 features of K", "forward passes", "K: PCA", "peak memory", "artifact: at most"):
        assert expected in text
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


def test_inspect_shows_header_and_sections_of_a_frame(
    artifact_dir: Path, tiny_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    artifact = load_artifact(artifact_dir)
    keys, values = prefill(load_model(tiny_llama, "bfloat16"), range(40))
    codec = KVCodec(artifact, CodecConfig(sink_tokens=0, window_tokens=0))
    ((_, encoded),) = codec.encode_node(keys, values, 100)
    assert encoded.kind is FrameKind.CODED
    frame = tmp_path / "frame.kvtc"
    frame.write_bytes(encoded.frame)
    capsys.readouterr()

    assert main(["inspect", str(frame)]) == 0
    text = capsys.readouterr().out
    for expected in (
        "CODED",
        "40, positions 100 to 139",
        "target ratio 2",
        artifact.digest.hex(),
        "K_SYMBOLS",
        "V_PARAMS",
    ):
        assert expected in text

    frame.write_bytes(encoded.frame[:-1] + b"\x00" if encoded.frame[-1] else encoded.frame[:-1] + b"\x01")
    assert main(["inspect", str(frame)]) == 1
    assert "checksum" in capsys.readouterr().err


def test_inspect_says_when_an_artifact_is_lossless_only(
    tiny_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*calibrate_command(tiny_llama, tmp_path), "--ratio", "1"]) == 0
    capsys.readouterr()
    assert main(["inspect", str(tmp_path)]) == 0
    assert "only lossless coding" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "code", "message"),
    [
        (["inspect", "absent"], 1, "absent: no such file"),
        (["calibrate", "--model", "absent", "--out", "out"], 1, "no Hugging Face model directory"),
        (["calibrate", "--model", "absent", "--out", "out", "--ratio", "0"], 1, "--ratio 0"),
    ],
)
def test_failures_are_one_sentence_and_exit_code_1(
    argv: list[str],
    code: int,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(argv) == code
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1


@pytest.mark.parametrize(
    "argv",
    [
        ["calibrate"],
        ["calibrate", "--model", "m"],
        ["calibrate", "--model", "m", "--out", "o", "--ratio", "many"],
        ["calibrate", "--model", "m", "--out", "o", "--ratio", "8", "--target-error", "0.1"],
        ["inspect"],
        ["plot", "artifact"],
    ],
)
def test_bad_usage_is_exit_code_2(argv: list[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(argv)
    assert stop.value.code == 2
