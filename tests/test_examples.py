"""The example configuration is complete and says the truth about defaults."""

import tomllib
from pathlib import Path

import msgspec

from sglang_kvtc.config import KVTCConfig, from_toml

EXAMPLE = Path(__file__).parents[1] / "examples/kvtc.toml"


def test_the_example_configuration_holds_every_key_at_its_default() -> None:
    config = from_toml(EXAMPLE)
    assert msgspec.structs.replace(config, artifact="") == KVTCConfig()
    table = tomllib.loads(EXAMPLE.read_text(encoding="utf-8"))
    expected = msgspec.to_builtins(KVTCConfig())
    assert table.keys() == expected.keys()
    for name in ("codec", "tier"):
        assert table[name].keys() == expected[name].keys()
