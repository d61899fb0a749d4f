"""SGLang's unified radix cache with the compressed tier below it.

Matching, splitting, locking, LRU order, load-back and events stay SGLang's; this class attaches our controller, asks
the tree where a node starts, and compresses stale nodes. Both tree cores work: nothing here touches node objects.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.registry import create_unified_radix_cache
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.mem_cache.utils import get_storage_hash_str
from sglang.srt.session.streaming_session import is_virtual_node

from sglang_kvtc.artifact.schema import Artifact
from sglang_kvtc.codec.codec import KVCodec
from sglang_kvtc.config import KVTCConfig
from sglang_kvtc.integration.arena import arena_bytes
from sglang_kvtc.integration.cell_pool import CellKVPool
from sglang_kvtc.integration.compat import (
    check_engine_version,
    check_internals,
    check_pool,
    check_rope,
    check_settings,
    load_for_model,
)
from sglang_kvtc.integration.controller import PRIVATE_LOAD, KVTCController
from sglang_kvtc.integration.flags import config_of
from sglang_kvtc.integration.gating import STATE, GatedRequest
from sglang_kvtc.integration.pool_port import CellPort, PoolPort
from sglang_kvtc.tier.policy import SlotClock
from sglang_kvtc.tier.store import Ids
from sglang_kvtc.tier.tier import CompressedTier

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.base_prefix_cache import InitLoadBackParams, InsertParams, InsertResult, MatchResult
    from sglang.srt.mem_cache.registry import TreeCacheBuildContext
    from sglang.srt.mem_cache.unified_cache.unified_tree_core_interface import NodeId

logger = logging.getLogger(__name__)

_TICK_S = 0.2
"""Least time between two looks for stale nodes; the scheduler calls in on every step, also while it spins idle."""


class KVTCRadixCache(UnifiedRadixCache):
    """Built by `build_kvtc_cache`, which calls `attach_tier` right after construction."""

    def attach_tier(self, tier: CompressedTier, tp_worker: Any) -> None:
        kvcache = self.token_to_kv_pool_allocator.get_kvcache()
        controller = KVTCController(
            tier=tier,
            allocator=self.token_to_kv_pool_allocator,
            num_layers=kvcache.layer_num,
            start_position_of=self._start_position_of,
            make_room=self._make_room,
        )
        self._tier = tier
        num_slots = kvcache.num_slots if isinstance(kvcache, CellKVPool) else len(kvcache.k_buffer[0])
        self._loads_are_private = False
        self._clock = SlotClock(num_slots, kvcache.k_buffer[0].device)
        self._next_tick = 0.0
        self.cache_controller = controller
        self.host_pool_group = controller.mem_pool_host
        self.full_kv_pool_host = controller.mem_pool_host
        self.components[ComponentType.FULL]._full_kv_pool_host = controller.mem_pool_host
        self.tree_core.set_hicache_enabled()
        self.is_write_back = True
        # Write-through on insert never: nodes are coded when they are evicted or stale.
        self.write_through_threshold = 1 << 30
        self.load_back_threshold = tier.config.restore_min_tokens
        kvcache.register_layer_transfer_counter(controller.layer_done_counter)
        tp_worker.register_hicache_layer_transfer_counter(controller.layer_done_counter)
        if isinstance(kvcache, CellKVPool):
            self.token_to_kv_pool_allocator.gating.publisher = self

    def tier_stats(self) -> dict[str, float]:
        """Numbers of the tier for `GET /server_info`."""
        return self._tier.stats()

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        result = super().match_prefix(params)
        if result.host_hit_length > 0:
            result = self._cut_at_damage(params, result)
        self._touch(result.last_device_node)
        return result

    def insert(self, params: InsertParams) -> InsertResult:
        result = super().insert(params)
        self._touch(result.last_device_node)
        return result

    def checkpoint(self, req: Req, *, up_to: int, **kwargs: Any) -> None:
        """Publish what a request computed. A gated one enters the tree when it ends, as frames only."""
        if not hasattr(req, STATE):
            super().checkpoint(req, up_to=up_to, **kwargs)
        elif req.finished():
            self._insert_frames(req, up_to)

    def encode(self, slots: torch.Tensor, start_position: int, scores: torch.Tensor) -> Ids | None:
        """Copy tokens of a gated request out (integration.gating.Publisher); the scheduler never waits for room."""
        return self._tier.compress(slots, start_position, self._make_room, wait_s=0, sidecar=scores)

    def free(self, ids: Ids) -> None:
        """Drop tokens that `encode` stored and that never entered the tree."""
        self._tier.free(ids)

    def init_load_back(self, params: InitLoadBackParams) -> tuple[int, NodeId] | None:
        """Start the restore of a hit. A gated request gets slots of its own, to be evicted from; the tree keeps frames.

        Returns the number of tokens to be restored and the deepest node on the device.
        """
        req = params.req
        self._loads_are_private = hasattr(req, STATE)
        if not self._loads_are_private:
            return super().init_load_back(params)
        transfer, _ = self.tree_core.build_load_back_spec(params.best_match_node, req=req)
        ids = transfer.host_indices
        slots = self._load_privately(ids) if len(ids) >= max(1, self.load_back_threshold) else None
        if slots is None:
            return 0, req.last_node
        self.token_to_kv_pool_allocator.gating.restore_into(req, slots, self._tier.sidecars(ids.numpy()))
        return len(slots), req.last_node

    def load_back_is_cache_owned(self) -> bool:
        """Asked right after `init_load_back`: whether its slots are the tree's."""
        return not self._loads_are_private

    def prefix_device_indices(self, req: Req) -> torch.Tensor:
        """Slots of the request's prefix: those on the tree's path, then those restored for it alone."""
        state: GatedRequest | None = getattr(req, STATE, None)
        if state is None or state.restored is None:
            return super().prefix_device_indices(req)
        path = self.tree_core.collect_full_device_indices(req.last_node, self.root_node_handle(req.extra_key))
        return torch.cat([path, state.restored])[: req.prefix_len]

    def _load_privately(self, ids: torch.Tensor) -> torch.Tensor | None:
        missing = len(ids) - self.token_to_kv_pool_allocator.available_size()
        if missing > 0:
            self.evict_for_alloc(EvictParams(num_tokens=missing))
        return self.cache_controller.load(ids, node_id=PRIVATE_LOAD)

    def _insert_frames(self, req: Req, up_to: int) -> None:
        """Put what was stored of a finished request into the tree, below the prefix it started from."""
        gating = self.token_to_kv_pool_allocator.gating
        start, ids = gating.take_ids(req, up_to)
        if not len(ids):
            return

        def key(first: int, end: int) -> RadixKey:
            return RadixKey(req.full_untruncated_fill_ids[first:end], req.extra_key, cache_salt=req.cache_salt)

        node = req.last_node
        if start > req.kv.cache_protected_len:
            found = super().match_prefix(MatchPrefixParams(key=key(0, start)))
            node = found.best_match_node
            if found.device_prefix_len + found.host_hit_length < start:
                # Its restored prefix was dropped from the tree meanwhile: nothing can hang below it.
                self._tier.free(ids)
                gating.counters.unpublished_requests += 1
                return
        end = start + len(ids)
        # A tree without storage reads none of these hashes, but it splits them with the node.
        hashes = get_storage_hash_str(key(0, end), page_size=self.page_size)[start:]
        result = self.tree_core.insert_host(node, key(start, end), torch.from_numpy(ids), hashes)
        self._apply_cache_actions(result.cache_actions)
        # The tree keeps what it has of the same tokens.
        self._tier.free(ids[: result.prefix_len])
        gating.counters.published_tokens += len(ids) - result.prefix_len

    def check_hicache_events(self) -> None:
        super().check_hicache_events()
        now = time.monotonic()
        if self._tier.config.stale_after_s > 0 and now >= self._next_tick:
            self._next_tick = now + _TICK_S
            self._compress_stale(now)

    def _cut_at_damage(self, params: MatchPrefixParams, result: MatchResult) -> MatchResult:
        """End a hit before the first chunk known to be lost, so that what is promised can be restored."""
        transfer, _ = self.tree_core.build_load_back_spec(result.best_match_node, req=params.req)
        ids = transfer.host_indices.numpy()
        usable = self._tier.restorable_prefix(ids)
        if usable == len(ids):
            return result
        length = (result.device_prefix_len + usable) // self.page_size * self.page_size
        return super().match_prefix(dataclasses.replace(params, key=params.key[:length]))

    def _touch(self, node_id: int) -> None:
        # A streaming session answers with a virtual node; its slots are locked and never stale.
        if self._tier.config.stale_after_s > 0 and not is_virtual_node(node_id):
            self._clock.touch(self.path_device_indices(node_id), time.monotonic())

    def _start_position_of(self, node_id: int, num_tokens: int) -> int:
        # A node is backed up while it is a device leaf, so its whole path is on the device.
        return len(self.path_device_indices(node_id)) - num_tokens

    def _make_room(self, num_tokens: int) -> bool:
        return self.evict_host(num_tokens) > 0

    def _compress_stale(self, now: float) -> None:
        """Compress a bounded number of leaves that nobody touched for `stale_after_s`, coldest first.

        Only while the device pool is used enough for it to matter (`stale_min_usage`), and only what the encoder can
        take at once: a scheduler step never waits for it here.
        """
        config = self._tier.config
        allocator = self.token_to_kv_pool_allocator
        if 1 - allocator.available_size() / allocator.size < config.stale_min_usage:
            return
        tracker = dict.fromkeys(self.tree_components, 0)
        self.tree_core.evict_device_start(ComponentType.FULL, allocator.size)
        try:
            for _ in range(config.compress_per_tick):
                node_id, _progress = self._evict_device_next_node(ComponentType.FULL, tracker)
                if node_id is None:
                    break
                path = self.path_device_indices(node_id)
                if self._clock.idle_s(int(path[-1]), now) < config.stale_after_s:
                    break
                if not self._tier.can_stage(len(path)) or not self._compress_leaf(node_id, tracker):
                    break
        finally:
            self.tree_core.evict_device_end(ComponentType.FULL)
        freed = sum(tracker.values())
        if freed:
            logger.info("kvtc: compressed stale prefixes, %d device tokens freed", freed)

    def _compress_leaf(self, node_id: int, tracker: dict[ComponentType, int]) -> bool:
        backup = self._evict_device_leaf(node_id, tracker)
        if backup is None:
            # It was backed up before: its slots are already free and nothing is coded again.
            return True
        if self._execute_and_commit_kv_backup(backup, write_back=True) == 0:
            return False
        self.writing_check(write_back=True)
        self._demote(node_id, tracker)
        return True


def build_kvtc_cache(ctx: TreeCacheBuildContext) -> KVTCRadixCache:
    """Factory of the backend `kvtc`, in the scheduler process.

    Checks again what the launcher checked (`sglang.Engine` has no launcher) and what only the scheduler knows. Raises
    a KVTCError, which ends the start.
    """
    check_engine_version()
    check_internals(KVTCRadixCache)
    config = config_of(ctx.server_args)
    check_settings(ctx.server_args, config)
    artifact = load_for_model(config, ctx.server_args.model_path)
    kvcache = ctx.params.token_to_kv_pool_allocator.get_kvcache()
    geometry = check_pool(kvcache, ctx.model_config, ctx.is_hybrid_swa or ctx.is_hybrid_ssm, artifact)
    artifact = dataclasses.replace(artifact, geometry=geometry)
    check_rope(ctx.tp_worker.model_runner.model, artifact, ctx.model_config.context_len)
    codec = KVCodec(artifact, config.codec)
    arena = arena_bytes(config.tier)
    # SGLang's own host pool is not built: `attach_tier` takes its place.
    cache = create_unified_radix_cache(
        dataclasses.replace(ctx, enable_hierarchical_cache=False), cache_class=KVTCRadixCache
    )
    port = CellPort(kvcache) if isinstance(kvcache, CellKVPool) else PoolPort(kvcache)
    cache.attach_tier(CompressedTier(codec, port, config.tier, arena), ctx.tp_worker)
    logger.info(_start_line(artifact, config, codec, arena))
    return cache


def _start_line(artifact: Artifact, config: KVTCConfig, codec: KVCodec, arena: int) -> str:
    mode = "lossless" if codec.target_ratio == 1 else f"lossy, target ratio {codec.target_ratio:g}"
    return (
        f"kvtc: model {artifact.fingerprint.name}, artifact {config.artifact} ({artifact.digest.hex()[:12]}), {mode}, "
        f"{codec.planned_bytes_per_token:.0f} of {artifact.geometry.bytes_per_token} bytes per coded token, "
        f"arena {arena} bytes on the host, backend cpu"
    )
