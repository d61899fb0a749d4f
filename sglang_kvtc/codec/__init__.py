"""The CPU reference of the codec: KV cache <-> symbols <-> frames (KVTC section 3)."""
