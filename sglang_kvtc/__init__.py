"""KV-cache transform coding for SGLang. Importing this package loads neither torch nor SGLang.

The public names below are imported from their modules when they are first used.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "Artifact": "sglang_kvtc.artifact.schema",
    "CodecConfig": "sglang_kvtc.config",
    "KVChunk": "sglang_kvtc.types",
    "KVCodec": "sglang_kvtc.codec.codec",
    "KVTCError": "sglang_kvtc.errors",
    "load_artifact": "sglang_kvtc.artifact.io",
}

__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
