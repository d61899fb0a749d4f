"""Fault injection for engine tests: an SGLang plugin of its own, found through PYTHONPATH by its dist-info.

The test writes commands to the file that KVTC_FAULTS names; the server reads it at each restore. The engine and the
tier are the real ones: only the stored bytes and the worker's pace are tampered with. With gated eviction, the pairs
that each eviction leaves are written to the folder that KVTC_MASKS names, and cells that hold no pair are filled with
NaN.
"""

import os
import time
from pathlib import Path


def load():
    masks = os.environ.get("KVTC_MASKS")
    if masks:
        watch_evictions(Path(masks))
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


def watch_evictions(folder):
    import numpy as np
    import torch

    from sglang_kvtc.eviction.cells import CellPool
    from sglang_kvtc.integration.cell_pool import CellKVPool
    from sglang_kvtc.integration.gating import Gating

    evict, release, create = Gating._evict, CellPool._release, CellKVPool._create_buffers_normal

    def watched(gating, req, state, budget):
        before = gating.counters.evicted_pairs
        evict(gating, req, state, budget)
        if gating.counters.evicted_pairs > before:
            alive = gating.pool.cells.alive(gating._slots(req.kv.req_pool_idx, 0, state.length))
            np.save(folder / f"{req.rid}.{state.length}.npy", alive.numpy())

    def create_and_remember(pool):
        create(pool)
        for buffer in (pool.k_cells, pool.v_cells):
            buffer[pool.cells.cells_per_token :] = torch.nan
        pool.cells.kvtc_buffers = (pool.k_cells, pool.v_cells)

    def release_and_poison(cells, slots, keep, num_freed):
        before = cells.table[:, slots]
        freed = release(cells, slots, keep, num_freed)
        gone = before[(before >= 0) & (cells.table[:, slots] < 0)].long()
        for buffer in cells.kvtc_buffers:
            buffer[gone] = torch.nan
        return freed

    Gating._evict = watched
    CellKVPool._create_buffers_normal = create_and_remember
    CellPool._release = release_and_poison
