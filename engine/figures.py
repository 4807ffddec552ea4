"""The engine's figures for /metrics, gathered from whoever keeps them. Names as in stats.py."""

from collections import Counter

from engine.inbox import Inbox
from engine.kv.block_manager import BlockManager
from engine.publisher import Publisher
from engine.scheduling.latency import LatencyModel
from engine.scheduling.scheduler import Scheduler
from engine.sequence import SequenceState
from engine.stats import EngineStats
from engine.transfer import TransferKind


def gauges(
    now_s: float,
    stats: EngineStats,
    scheduler: Scheduler,
    blocks: BlockManager,
    latency: LatencyModel,
    publisher: Publisher,
    inbox: Inbox,
    requests: Counter[SequenceState],
) -> dict[str, float]:
    """How things are. Owned, cached, free and in-transfer blocks are all that can be handed out. O(blocks owned)."""
    usage = scheduler.kv_usage()
    return {
        "kv_cache_usage": usage.num_owned_blocks / (blocks.pool.num_blocks - 1),
        "kv_slot_utilization": usage.utilization,
        "num_free_blocks": usage.num_free_blocks,
        "num_allocated_blocks": usage.num_owned_blocks,
        "num_cached_blocks": usage.num_cached_blocks,
        "num_in_transfer_blocks": usage.num_in_transfer_blocks,
        "num_host_blocks": blocks.tiers.host.num_blocks if blocks.tiers else 0,
        "num_used_host_blocks": blocks.num_host_blocks,
        "num_disk_blocks": blocks.tiers.num_disk_blocks if blocks.tiers else 0,
        "num_used_disk_blocks": blocks.num_disk_blocks,
        "num_running_transfers": scheduler.num_transfers,
        "num_running_requests": requests[SequenceState.RUNNING],
        "num_waiting_requests": requests[SequenceState.WAITING],
        "num_paused_requests": requests[SequenceState.PAUSED],
        "num_running_sequences": scheduler.num_running,
        "num_waiting_sequences": scheduler.num_waiting,
        "num_paused_sequences": scheduler.num_paused,
        "tokens_per_second": stats.generated.per_second(now_s),
        "avg_prefill_latency_ms": 1000 * stats.prefill.recent_mean,
        "avg_decode_latency_ms": 1000 * stats.decode_step.recent_mean,
        "avg_e2e_latency_ms": 1000 * stats.e2e.recent_mean,
        "latency_model_error": latency.error,
        "num_live_streams": publisher.num_live,
        "num_detached_streams": publisher.num_detached,
        "num_kept_streams": publisher.num_kept,
        "kept_stream_bytes": publisher.kept_bytes,
        "num_gateways": len(inbox.last_heard_s),
        "unacked_bytes": sum(map(publisher.unacked_bytes, inbox.last_heard_s)),
    }


def counters(stats: EngineStats, scheduler: Scheduler, blocks: BlockManager, publisher: Publisher) -> dict[str, float]:
    """What has happened since the start."""
    counts, tiers = scheduler.counts, blocks.tier_counts
    found: dict[str, float] = {
        **stats.counters,
        "kept_streams_dropped_total": publisher.num_dropped,
        "copy_on_write_copies_total": blocks.num_block_copies,
        "prefix_cache_evictions_total": blocks.num_evictions,
        "prefix_hit_tokens_total": counts.num_prefix_hit_tokens,
        "prefix_query_tokens_total": counts.num_prompt_tokens,
        "host_hit_tokens_total": tiers.num_host_hit_tokens,
        "disk_hit_tokens_total": tiers.num_disk_hit_tokens,
        "damaged_disk_blocks_total": tiers.num_damaged_disk_blocks,
        'preemptions_total{kind="recompute"}': counts.preemptions["recompute"],
        'preemptions_total{kind="swap"}': counts.preemptions["swap"],
        "prefill_tokens_total": counts.num_prefill_tokens,
        "recomputed_tokens_total": counts.num_recomputed_tokens,
        "wasted_tokens_total": counts.num_wasted_tokens,
        "unreturned_tokens_total": counts.num_unreturned_tokens,
    }
    for kind in TransferKind:
        label = f'{{direction="{kind.name.lower()}"}}'
        found[f"transfers_total{label}"] = counts.num_transfers[kind]
        if kind is not TransferKind.DROP_FROM_DISK:
            found[f"offload_bytes_total{label}"] = counts.num_transfer_bytes[kind]
    return found
