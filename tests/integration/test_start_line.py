from __future__ import annotations

from pathlib import Path

import pytest
from codec.toy_model import RATIO, make_artifact

from sglang_kvtc.codec.codec import KVCodec
from sglang_kvtc.config import CodecConfig, KVTCConfig
from sglang_kvtc.integration.radix_cache import _start_line


@pytest.mark.parametrize(
    ("ratio", "mode"), [(0.0, f"lossy, target ratio {RATIO:g}"), (RATIO, "lossy"), (1.0, "lossless")]
)
def test_a_num_08_the_start_says_whether_coding_is_lossy(ratio: float, mode: str) -> None:
    artifact, config = make_artifact(), KVTCConfig(artifact="here", codec=CodecConfig(target_ratio=ratio))
    line = _start_line(artifact, config, KVCodec(artifact, config.codec), arena=1 << 20)
    assert f", {mode}" in line
    assert ("lossy" in line) != ("lossless" in line)


def test_a_num_08_the_documentation_says_that_coding_is_lossy() -> None:
    readme = Path(__file__).parents[2].joinpath("README.md").read_text(encoding="utf-8")
    assert "lossy unless the ratio is 1" in readme
