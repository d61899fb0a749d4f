from __future__ import annotations

from pathlib import Path

import pytest
from bitstream import fuzz_frames
from golden.make_golden import HERE

from sglang_kvtc.bitstream import entropy


def test_a_second_of_fuzzing_finds_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    fuzz_frames.main(["--seconds", "1", "--seed", "7", str(HERE / "v1"), str(HERE / "bad")])
    count = int(capsys.readouterr().err.split()[0])
    assert count > 100


def test_golden_frames_are_inputs_and_bad_ones_are_no_corpus() -> None:
    assert len(fuzz_frames._frames_of([HERE / "v1"])) == len(list((HERE / "v1").glob("*.kvtc")))
    assert fuzz_frames._frames_of([HERE / "bad" / "last_byte_cut.kvtc"]) == []


def test_what_breaks_the_reader_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> bytes:
        raise IndexError("a bug")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(entropy, "decode", broken)
    with pytest.raises(IndexError):
        fuzz_frames.main(["--seconds", "60"])
    (crash,) = tmp_path.glob("crash-*")
    with pytest.raises(IndexError):
        fuzz_frames.fuzz_one(crash.read_bytes())


@pytest.mark.parametrize("blob", [b"", b"KVTC", bytes(7), bytes(8), bytes(44), b"KVTC\x01" + bytes(60)])
def test_inputs_too_short_for_a_frame_are_read_too(blob: bytes) -> None:
    fuzz_frames.fuzz_one(blob)
