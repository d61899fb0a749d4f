"""A-SEC-03: what one tenant cached never serves another, whatever tier it lies in.

The tree decides which tenant a prefix belongs to, so its answers decide what a probe can measure: a hit of another
namespace would show in the time to the first token, its absence leaves nothing to measure. The probes themselves need a
server (tests/engine).
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InitLoadBackParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

from sglang_kvtc.codec.codec import KVCodec
from sglang_kvtc.config import CodecConfig, TierConfig
from sglang_kvtc.integration.pool_port import PoolPort
from sglang_kvtc.integration.radix_cache import KVTCRadixCache
from sglang_kvtc.tier.tier import CompressedTier
from tests.tier.test_tier import ARTIFACT, GEOMETRY

Tenant = tuple[str | None, str | None]
"""`extra_key` and `cache_salt` of a request."""

TENANTS: tuple[Tenant, ...] = (("a", None), ("b", None), (None, None), (None, "a"), (None, "s"), ("a", "s"))
PROMPT = array("q", range(1000, 1100))
SLOTS = 1000


class Tree:
    """Our radix cache over SGLang's own pools, without a server."""

    def __init__(self, core: str) -> None:
        self.pool = MHATokenToKVPool(
            SLOTS,
            1,
            dtype=torch.bfloat16,
            head_num=GEOMETRY.num_kv_heads,
            head_dim=GEOMETRY.head_dim,
            layer_num=GEOMETRY.num_layers,
            device="cpu",
            enable_memory_saver=False,
        )
        noise = torch.Generator().manual_seed(0)
        for buffer in (*self.pool.k_buffer, *self.pool.v_buffer):
            buffer.normal_(generator=noise)
        self.port = PoolPort(self.pool)
        self.allocator = TokenToKVPoolAllocator(SLOTS, torch.bfloat16, "cpu", self.pool, need_sort=False)
        config = TierConfig(arena_bytes=1 << 24, stale_after_s=0)
        self.tier = CompressedTier(KVCodec(ARTIFACT, CodecConfig()), self.port, config, config.arena_bytes)
        self.cache = KVTCRadixCache(
            CacheInitParams(
                disable=False,
                req_to_token_pool=ReqToTokenPool(4, 512, "cpu", enable_memory_saver=False),
                token_to_kv_pool_allocator=self.allocator,
                page_size=1,
                tree_components=(ComponentType.FULL,),
                tree_core_backend=core,
            )
        )
        worker = SimpleNamespace(register_hicache_layer_transfer_counter=lambda _counter: None)
        self.cache.attach_tier(self.tier, worker)

    def insert(self, tenant: Tenant) -> torch.Tensor:
        """Cache PROMPT for a tenant; returns its slots."""
        slots = self.allocator.alloc(len(PROMPT))
        self.cache.insert(InsertParams(key=key(tenant), value=slots))
        return slots

    def hits(self, tenant: Tenant, prompt: array[int] = PROMPT) -> tuple[int, int]:
        """Tokens of the prompt found on the device and in the tier."""
        found = self.cache.match_prefix(MatchPrefixParams(key=key(tenant, prompt)))
        return found.device_prefix_len, found.host_hit_length

    def compress(self, num_tokens: int) -> None:
        self.cache.evict(EvictParams(num_tokens=num_tokens))
        self.cache.check_hicache_events()
        self.tier.worker.drain()

    def restore(self, tenant: Tenant) -> tuple[torch.Tensor, torch.Tensor]:
        """Load the prompt back for a request of the tenant; returns its K and V."""
        found = self.cache.match_prefix(MatchPrefixParams(key=key(tenant)))
        extra_key, salt = tenant
        request = SimpleNamespace(
            rid="probe",
            extra_key=extra_key,
            cache_salt=salt,
            last_node=found.last_device_node,
            kv=SimpleNamespace(mamba_pool_idx=None),
            swa_host_hit_length=0,
            mamba_host_hit_length=0,
        )
        wanted = InitLoadBackParams(found.best_match_node, found.host_hit_length, req=request)
        num_tokens, node = self.cache.init_load_back(wanted)
        assert num_tokens == len(PROMPT)
        controller = self.cache.cache_controller
        events = controller.layer_done_counter.events[controller.start_loading()]
        for layer in range(GEOMETRY.num_layers):
            events.wait(layer)
        self.tier.worker.drain()
        self.cache.check_hicache_events()
        return self.port.gather(self.cache.path_device_indices(node))


def key(tenant: Tenant, prompt: array[int] = PROMPT) -> RadixKey:
    extra_key, salt = tenant
    return RadixKey(prompt, extra_key, cache_salt=salt)


@pytest.fixture(params=["rust", "python"])
def tree(request: pytest.FixtureRequest) -> Iterator[Tree]:
    tree = Tree(request.param)
    yield tree
    tree.tier.close()


@pytest.mark.parametrize("owner", TENANTS, ids=str)
def test_a_sec_03_a_prefix_is_found_by_its_own_tenant_alone_on_the_device_in_the_tier_and_restored(
    tree: Tree, owner: Tenant
) -> None:
    others = [tenant for tenant in TENANTS if tenant != owner]
    guesses = (PROMPT, PROMPT[:40], PROMPT + array("q", [7, 8, 9]))

    def assert_hidden() -> None:
        for other, guess in itertools.product(others, guesses):
            assert tree.hits(other, guess) == (0, 0)

    tree.insert(owner)
    assert tree.hits(owner) == (len(PROMPT), 0)
    assert_hidden()
    tree.compress(len(PROMPT))
    assert tree.hits(owner) == (0, len(PROMPT))
    assert_hidden()
    tree.restore(owner)
    assert tree.hits(owner) == (len(PROMPT), 0)
    assert_hidden()


def test_a_sec_03_the_same_prompt_of_many_tenants_is_stored_and_restored_for_each(tree: Tree) -> None:
    """Their KV differs here, as it does with another adapter, so that a mix-up shows."""
    stored = {tenant: tree.port.gather(tree.insert(tenant)) for tenant in TENANTS}
    tree.compress(len(TENANTS) * len(PROMPT))
    assert tree.tier.store.usage().live_tokens == len(TENANTS) * len(PROMPT)
    assert {tree.hits(tenant) for tenant in TENANTS} == {(0, len(PROMPT))}
    for tenant, expected in stored.items():
        for restored, original in zip(tree.restore(tenant), expected, strict=True):
            assert torch.equal(restored, original)


def test_a_sec_03_damage_to_the_frames_of_one_tenant_is_a_miss_of_that_tenant_alone(tree: Tree) -> None:
    owner, other = TENANTS[:2]
    stored = {tenant: tree.port.gather(tree.insert(tenant)) for tenant in (owner, other)}
    tree.compress(2 * len(PROMPT))
    tree.tier.store.invalidate(tree.tier.store._chunks[0])
    hits = {tenant: tree.hits(tenant) for tenant in stored}
    assert sorted(hits.values()) == [(0, 0), (0, len(PROMPT))]
    whole = max(hits, key=hits.__getitem__)
    for restored, original in zip(tree.restore(whole), stored[whole], strict=True):
        assert torch.equal(restored, original)
