"""Frames: symbols and raw KV to bytes and back. FORMAT.md is the authority; numpy only, never torch."""
