"""Fault injection for engine tests: an SGLang plugin of its own, found through PYTHONPATH by its dist-info.

The test writes commands to the file that KVTC_FAULTS names; the server reads it at each restore. The engine and the
tier are the real ones: only the stored bytes and the worker's pace are tampered with.
"""

import os
import time
from pathlib import Path


def load():
    control = os.environ.get("KVTC_FAULTS")
    if not control:
        return
    from sglang_kvtc.tier.tier import CompressedTier
    from sglang_kvtc.tier.worker import TierWorker

    prepare, restore, encode = CompressedTier.prepare_restore, TierWorker._restore, TierWorker._encode

    def commands():
        words = Path(control).read_text().split() if Path(control).exists() else []
        return dict(word.split("=") for word in words)

    def prepare_restore(tier, ids, slots_of):
        offset = commands().get("flip_byte")
        if offset is not None:
            for segment in tier.store.segments(ids):
                frame = bytearray(segment.chunk.frame)
                frame[int(offset) % len(frame)] ^= 0x10
                segment.chunk.frame = bytes(frame)
        return prepare(tier, ids, slots_of)

    def slow_restore(worker, job):
        time.sleep(float(commands().get("restore_delay_s", 0)))
        restore(worker, job)

    def slow_encode(worker, chunk):
        time.sleep(float(commands().get("encode_delay_s", 0)))
        encode(worker, chunk)

    CompressedTier.prepare_restore = prepare_restore
    TierWorker._restore = slow_restore
    TierWorker._encode = slow_encode
