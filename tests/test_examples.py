"""The example configuration is complete and says the truth about defaults."""

import tomllib
from pathlib import Path

import msgspec

from sglang_kvtc.config import KVTCConfig, from_toml
from sglang_kvtc.eviction.budget import Budget

EXAMPLE = Path(__file__).parents[1] / "examples/kvtc.toml"


def test_the_example_configuration_holds_every_key_at_its_default() -> None:
    config = from_toml(EXAMPLE)
    assert msgspec.structs.replace(config, artifact="") == KVTCConfig()
    table = tomllib.loads(EXAMPLE.read_text(encoding="utf-8"))
    expected = msgspec.to_builtins(KVTCConfig())
    assert table.keys() == expected.keys()
    for name in ("codec", "tier", "eviction"):
        assert table[name].keys() == expected[name].keys()


def test_the_example_names_every_field_of_a_budget() -> None:
    text = EXAMPLE.read_text(encoding="utf-8")
    assert [name for name in Budget.__struct_fields__ if name not in text] == []
