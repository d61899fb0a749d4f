"""The `sglang-kvtc` command."""
