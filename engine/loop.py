"""THE LOOP: messages → plan → launch → collect → publish.

One thread owns the socket, the scheduler and the publisher. Others only wake it: the executor when a step is done,
the loader when the model is there, a signal that asks for the end.
"""

import gc
import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable
from math import inf
from typing import Final

from engine import figures
from engine.executor import Executor, Launch, ReportProgress
from engine.flight_record import FlightRecord
from engine.inbox import Inbox
from engine.kv.block_manager import BlockManager
from engine.kv.tiers import TierSizes
from engine.loading import Loader
from engine.plan import StepPlan
from engine.publisher import Publisher
from engine.requests import Requests
from engine.scheduling.latency import LatencyModel
from engine.scheduling.limits import SchedulerLimits
from engine.scheduling.scheduler import Scheduler
from engine.sequence import SequenceOutput
from engine.snapshot import Snapshots, record_of
from engine.stats import EngineStats
from engine.succession import Succession
from streamkv.config import EngineConfig
from streamkv.errors import StreamKVError
from streamkv.log import fields
from streamkv.process import EXIT_UNUSABLE
from streamkv.protocol import (
    WIRE_VERSION,
    Abort,
    Attach,
    Drain,
    Forget,
    GatewayMessage,
    GetSnapshot,
    GetStats,
    HandedOver,
    Heartbeat,
    Hello,
    Keep,
    Loading,
    Pause,
    Ready,
    Resume,
    Stats,
    Submit,
)
from streamkv.transport import EngineSocket, default_endpoint, flight_record_path, load_curve_keys

logger = logging.getLogger(__name__)

EXIT_ASKED: Final = 0
"""The end was asked for: Drain, SIGTERM, SIGINT."""
EXIT_FAULT: Final = 1
"""A step, or the loop itself, failed. A new engine may do better; its streams go on there."""
DEFAULT_DRAIN_S: Final = 30.0

_LOADING_EVERY_S: Final = 0.1
_OVERSLEPT_S: Final = 3.0
"""So late is a heartbeat only if this process could not run: its container was frozen, say."""
_MOST_NEW_OBJECTS: Final = 3_000_000
"""By which the objects that a collection looks at may have grown: an engine that always has somebody live and leaves
garbage has its lull then, and not none until its memory is full."""
_CLOSE_LIMIT_S: Final = 5.0
"""What it may take to close a device that has failed."""
_FLUSH_LIMIT_S: Final = 4.0
"""What writing the cache to disk may take at the end; the supervisor kills an engine that takes ten seconds."""


class _Span:
    """When a step was launched, and when it was done. Knows nothing of its launch, which knows it: no circle."""

    __slots__ = ("_clock", "_wake", "done_s", "launched_s")

    def __init__(self, clock: Callable[[], float], wake: Callable[[], None]) -> None:
        self._clock = clock
        self._wake = wake
        self.launched_s = clock()
        self.done_s = 0.0
        """0: the executor has not told of its end."""

    def end(self) -> None:
        """From any thread."""
        self.done_s = self._clock()
        self._wake()


class EngineLoop:
    """One engine: an executor, the requests that it computes, and the gateways that sent them.

    Made and run on one thread; only `drain`, `hand_over` and `stop` may be called from others, or from a signal
    handler.
    """

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor,
        clock: Callable[[], float] = time.monotonic,
        *,
        report: ReportProgress | None = None,
        on_loaded: Callable[[], None] | None = None,
        on_lull: Callable[[], None] | None = None,
    ) -> None:
        """Binds the endpoint. Raises ConfigError.

        report: told how far loading is, on the loading thread. on_loaded: called on the loop's when that is over.
        on_lull: called there when nothing is live any more: the time for what would hold up live streams. With streams
        live only when millions of objects are new.
        """
        self._config = config
        self._executor = executor
        self._clock = clock
        self._report = report
        self._on_loaded = on_loaded
        self._on_lull = on_lull
        self._socket = EngineSocket(
            config.endpoint or default_endpoint(), load_curve_keys(config.curve_secret_key_file)
        )
        self._stats = EngineStats()
        self._inbox = Inbox(self._socket, self._stats, clock)
        self._flight = FlightRecord(flight_record_path(self._socket.endpoint))
        self._publisher = Publisher(self._socket.send)
        self._epoch = secrets.randbits(62) + 1
        self._succession = Succession(
            self._epoch, follows=self._flight.is_successor, until_s=clock() + config.gateway_timeout_s
        )
        self._ready: Ready | None = None
        """What the engine is, once it takes work; the five below stand from then on."""
        self._blocks: BlockManager
        self._latency: LatencyModel
        self._scheduler: Scheduler
        self._requests: Requests
        self._snapshots: Snapshots
        self._in_flight: deque[tuple[Launch, _Span]] = deque()
        self._outputs: list[SequenceOutput] = []
        """What this turn has brought and not yet published."""
        self._exit_code: int | None = None
        self._must_end_now = False
        self._is_handing_over = False
        self._is_draining = False
        self._drain_asked_s = inf
        """Limit of a drain that was asked for and whose time does not yet run."""
        self._drain_until_s = inf
        now_s = clock()
        self._next_heartbeat_s = now_s
        self._progress_s = now_s
        """When the newest step finished, or work came to an idle engine."""
        self._done_s = now_s
        """When the newest collected step was done."""
        self._lull_s = now_s
        """When on_lull was last called."""
        self._had_work = False
        self._next_plan_s = inf
        """When a step is planned if nothing happens before; inf: the device has all it takes, or nothing can run."""

    @property
    def endpoint(self) -> str:
        """Where it listens, with the real port."""
        return self._socket.endpoint

    def drain(self, limit_s: float = DEFAULT_DRAIN_S) -> None:
        """Take no new work; end when the live streams have ended, and abort those that live after `limit_s`. Asked
        twice, the earlier end counts."""
        self._is_draining = True
        self._drain_asked_s = limit_s
        self._socket.wake()

    def hand_over(self) -> None:
        """End for the next engine's sake, with the steps on their way. Nobody is told an end: gateways send their live
        streams to the next one, which finds on disk what was cached."""
        self._is_handing_over = True
        self._exit_code = EXIT_ASKED
        self._socket.wake()

    def stop(self) -> None:
        """End at once."""
        self._exit_code = EXIT_ASKED
        self._must_end_now = True
        self._socket.wake()

    def run(self) -> int:
        """Load, then serve until the end. Returns the process's exit code; the socket and the executor are closed."""
        loader = Loader(self._executor, self._socket.wake, self._report)
        try:
            self._wait_for(loader)
            self._serve()
            if self._exit_code == EXIT_ASKED and self._ready is not None:
                self._flush()
        except Exception:
            logger.exception("the engine failed")
            self._exit_code = EXIT_FAULT
        finally:
            if self._exit_code == EXIT_ASKED:
                self._flight.close()
            self._socket.close()
            if not loader.is_alive:
                self._close_executor()
        assert self._exit_code is not None
        return self._exit_code

    def _close_executor(self) -> None:
        """A device at fault may answer nothing more, or fail in every call: it is left to the end of the process."""
        if self._exit_code != EXIT_FAULT:
            self._executor.close()
            return

        def close() -> None:
            try:
                self._executor.close()
            except Exception as error:
                logger.warning("the device could not be closed", extra=fields(error=str(error)))

        closing = threading.Thread(target=close, name="closing", daemon=True)
        closing.start()
        closing.join(_CLOSE_LIMIT_S)

    # Loading

    def _wait_for(self, loader: Loader) -> None:
        """Answer gateways while the model loads."""
        loader.start()
        logger.info("listening", extra=fields(endpoint=self.endpoint))
        told, tell_again_s = None, self._clock()
        while self._exit_code is None and loader.result is None:
            now_s = self._clock()
            self._heartbeat_if_due(now_s)
            if loader.progress is not told and now_s >= tell_again_s:
                told, tell_again_s = loader.progress, now_s + _LOADING_EVERY_S
                self._inbox.send_all(told)
            due_s = self._next_heartbeat_s if loader.progress is told else min(tell_again_s, self._next_heartbeat_s)
            self._socket.wait(max(0.0, due_s - now_s))
            for gateway_id, message in self._inbox.receive():
                self._answer_while_loading(gateway_id, message, loader.progress)
            for gateway_id in self._inbox.take_silent(self._config.gateway_timeout_s):
                self._succession.lose(gateway_id)
            if self._is_draining:
                self._exit_code = EXIT_ASKED
        if self._on_loaded is not None:
            self._on_loaded()
        if self._exit_code is None:
            self._begin(loader)

    def _answer_while_loading(self, gateway_id: bytes, message: GatewayMessage, progress: Loading) -> None:
        match message:
            case Hello():
                self._succession.greet(gateway_id, message.epoch)
                self._inbox.send(gateway_id, progress)
            case Submit() | Attach() | Abort() | Pause() | Resume():
                text = f"the engine is not ready: {progress.stage}, {progress.percent:.0f} %"
                self._inbox.refuse(gateway_id, "not_ready", text, message.request_id)
            case GetStats():
                self._inbox.send(gateway_id, Stats(message.query_id, {}, dict(self._stats.counters)))
            case GetSnapshot():
                self._inbox.refuse(gateway_id, "not_ready", f"the engine is not ready: {progress.stage}")
            case Drain():
                self._exit_code = EXIT_ASKED
            case Heartbeat() | Keep() | HandedOver() | Forget():
                pass  # a gateway sends the last three to an engine that is ready

    def _begin(self, loader: Loader) -> None:
        """The model is there, or is not to be had."""
        if isinstance(loader.result, BaseException):
            self._exit_code = EXIT_UNUSABLE if isinstance(loader.result, StreamKVError) else EXIT_FAULT
            logger.error(
                "the model could not be loaded",
                extra=fields(error=str(loader.result)),
                exc_info=None if isinstance(loader.result, StreamKVError) else loader.result,
            )
            return
        assert loader.result is not None
        model, limits = loader.result
        tiers = None
        if limits.num_host_blocks:
            tiers = TierSizes(limits.num_host_blocks, limits.num_disk_blocks, limits.stored)
        self._blocks = BlockManager(limits.num_blocks, limits.block_size, self._config.enable_prefix_caching, tiers)
        scheduler_limits = SchedulerLimits(
            max_num_seqs=self._config.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            max_prefill_tokens=self._config.max_prefill_tokens,
            max_num_partial_prefills=self._config.max_num_partial_prefills,
            enable_chunked_prefill=self._config.enable_chunked_prefill,
            max_model_len=limits.max_model_len,
            max_queue=self._config.max_queue,
            eos_token_ids=tuple(model.eos_token_ids),
            preemption_mode=self._config.preemption_mode,
            ageing_s=self._config.ageing_s,
            itl_target_s=self._config.itl_target_ms / 1000,
        )
        self._latency = LatencyModel(
            limits.step_samples, limits.block_bytes, limits.host_bytes_per_s, limits.token_buckets
        )
        self._scheduler = Scheduler(scheduler_limits, self._blocks, self._clock, self._latency)
        self._requests = Requests(
            self._config,
            model,
            self._scheduler,
            scheduler_limits,
            self._latency,
            self._publisher,
            self._inbox,
            self._stats,
            self._clock,
            lambda grammar: self._executor.compile_grammar(grammar, self._socket.wake),
            self._succession,
        )
        self._snapshots = Snapshots(self._stats, self._scheduler, self._blocks, self._publisher, self._clock)
        self._ready = Ready(
            wire_version=WIRE_VERSION,
            epoch=self._epoch,
            model=model,
            block_size=limits.block_size,
            num_blocks=limits.num_blocks,
            max_num_seqs=self._config.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            suspects=list(self._flight.suspects),
            suspects_tokens=list(self._flight.suspects.values()),
            max_attach_grace_s=self._config.max_attach_grace_s,
        )
        self._inbox.send_all(self._ready)
        logger.info(
            "ready",
            extra=fields(
                model=model.name,
                dtype=model.dtype,
                device=model.device,
                max_model_len=model.max_model_len,
                num_blocks=limits.num_blocks,
                block_size=limits.block_size,
            ),
        )

    # Serving

    def _serve(self) -> None:
        """Messages come first, so that no plan misses an abort; results last, when the device is busy again.

        Never spins: it sleeps until a message, a finished step or transfer, or the next thing that a clock makes due.
        """
        while self._exit_code is None:
            has_frame = self._socket.wait(self._wait_s())
            self._requests.take_compiled()
            if has_frame or self._inbox.has_more:
                for gateway_id, message in self._inbox.receive():
                    self._handle(gateway_id, message)
            while self._in_flight and self._in_flight[0][0].is_done:
                self._collect(*self._in_flight.popleft())
            self._finish_transfers()
            self._look_at_clock()
            self._requests.look_at_suspects()
            self._launch_what_is_due()
            self._start_transfers()
            self._publish()

    def _wait_s(self) -> float:
        if self._inbox.has_more or self._exit_code is not None:
            return 0.0
        due_s = min(
            self._next_heartbeat_s,
            self._scheduler.next_deadline_s,
            self._publisher.next_expiry_s,
            self._requests.next_compile_limit_s,
            self._drain_until_s,
        )
        return max(0.0, min(due_s, self._next_plan_s) - self._clock())

    def _launch_what_is_due(self) -> None:
        # What is decided here is kept: by the time the loop goes to sleep the clock has gone on.
        while (plan_s := self._plan_from_s()) <= self._clock():
            plan = self._scheduler.plan()
            if not plan:
                plan_s = inf
                break
            self._launch(plan)
        self._next_plan_s = plan_s

    def _plan_from_s(self) -> float:
        """When to plan the next step; inf: once the oldest is done."""
        if not self._in_flight:
            return 0.0
        if len(self._in_flight) == self._executor.max_in_flight:
            return inf
        launch, span = self._in_flight[-1]
        return self._latency.plan_next_from_s(max(span.launched_s, self._done_s), launch.plan.load)

    def _launch(self, plan: StepPlan) -> None:
        self._stats.batch_size = len(plan.scheduled)
        self._flight.launched(self._scheduler.newest_launched)
        span = _Span(self._clock, self._socket.wake)
        self._in_flight.append((self._executor.launch(plan, span.end), span))

    def _collect(self, launch: Launch, span: _Span) -> None:
        """Take in a finished step. What a step raises ends the engine: its streams go on in the next one."""
        tokens = self._executor.collect(launch)
        self._flight.collected()
        now_s = self._clock()
        # A step begins when it's launched, or when the one before it is done. That this side came late is not its time.
        done_s = span.done_s or now_s
        step_s = done_s - max(span.launched_s, self._done_s)
        self._done_s = done_s
        if not tokens.prompt_logprobs:  # which cost what the model knows nothing of
            self._latency.observe(launch.plan.load, step_s)
        self._outputs += self._scheduler.update(launch.plan, tokens)
        if not launch.plan.num_prefill_requests:
            self._stats.decode_step.add(step_s)
        self._stats.counters["steps_total"] += 1
        self._stats.steps.append(record_of(launch.plan, now_s, step_s))
        self._progress_s = now_s

    def _start_transfers(self) -> None:
        for transfer in self._scheduler.take_transfers():
            self._executor.start_transfer(transfer, self._socket.wake)

    def _finish_transfers(self) -> None:
        if self._scheduler.num_transfers and (results := self._executor.finished_transfers()):
            self._scheduler.finish_transfers(results)
            self._progress_s = self._clock()

    def _flush(self) -> None:
        """Let the disk keep what is cached, for the next engine, as far as the time allows."""
        if self._is_handing_over and not self._must_end_now:
            self._set_down()
        until_s = self._clock() + _FLUSH_LIMIT_S
        self._blocks.flush()
        while not self._must_end_now:
            self._start_transfers()
            if not self._blocks.num_unfinished_transfers:
                return
            now_s = self._clock()
            if now_s >= until_s:
                logger.info("not all of the cache was written to disk", extra=fields(limit_s=_FLUSH_LIMIT_S))
                return
            self._heartbeat_if_due(now_s)
            self._socket.wait(max(0.0, min(until_s, self._next_heartbeat_s) - now_s))
            for gateway_id, message in self._inbox.receive():
                if not self._is_handing_over:  # otherwise it is for the next engine, as all that lives is
                    self._handle(gateway_id, message)
            self._finish_transfers()

    def _set_down(self) -> None:
        """Tell what the last steps have brought, and leave the blocks of all that lives to the cache."""
        while self._in_flight:
            self._collect(*self._in_flight.popleft())
        self._publish()
        live = self._publisher.live()
        logger.info("handing over", extra=fields(num_live=len(live)))
        for request in live:
            self._scheduler.abort(request, "restart")  # what it hands out goes to nobody

    def _publish(self) -> None:
        outputs = self._outputs + self._requests.ended
        if outputs:
            self._outputs, self._requests.ended = [], []
            now_s = self._clock()
            self._stats.count_outputs(outputs, now_s)
            self._publisher.publish(outputs, now_s)
            self._requests.hold_back()
        if self._is_draining and not self._publisher.num_live:
            self._exit_code = EXIT_ASKED

    # What a clock makes due

    def _look_at_clock(self) -> None:
        now_s = self._clock()
        has_work = self._has_work
        if has_work and not self._had_work:
            self._progress_s = now_s
        self._had_work = has_work
        if self._heartbeat_if_due(now_s):
            for gateway_id in self._inbox.take_silent(self._config.gateway_timeout_s):
                self._requests.lose_gateway(gateway_id, now_s)
            self._rest_in_lull()
        self._outputs += self._scheduler.expire()
        for request in self._publisher.expire(now_s):
            self._requests.end(request, "gateway_lost")
        if self._drain_asked_s < inf:
            logger.info("draining", extra=fields(limit_s=self._drain_asked_s, num_live=self._publisher.num_live))
            self._drain_until_s = min(self._drain_until_s, now_s + self._drain_asked_s)
            self._drain_asked_s = inf
        if now_s >= self._drain_until_s:
            for request in self._publisher.live():
                self._requests.end(request, "drain")

    def _rest_in_lull(self) -> None:
        has_stopped = not self._publisher.num_live and not self._in_flight and self._progress_s > self._lull_s
        if self._on_lull is not None and (has_stopped or gc.get_count()[0] > _MOST_NEW_OBJECTS):
            self._on_lull()
            self._lull_s = self._clock()

    @property
    def _has_work(self) -> bool:
        return bool(self._in_flight) or self._scheduler.has_runnable

    def _heartbeat_if_due(self, now_s: float) -> bool:
        if now_s < self._next_heartbeat_s:
            return False
        if now_s > self._next_heartbeat_s + _OVERSLEPT_S:
            self._inbox.listen_anew()
        self._next_heartbeat_s = now_s + self._config.heartbeat_s
        has_work = self._ready is not None and self._has_work
        self._inbox.send_all(
            Heartbeat(
                last_step=self._publisher.step,
                epoch=self._epoch,
                has_work=has_work,
                step_age_s=now_s - self._progress_s if has_work else 0.0,
                expected_step_s=self._latency.predict_s(self._in_flight[0][0].plan.load) if self._in_flight else 0.0,
            )
        )
        return True

    # Messages

    def _handle(self, gateway_id: bytes, message: GatewayMessage) -> None:
        requests = self._requests
        match message:
            case Heartbeat():
                if message.epoch == self._epoch:
                    requests.acknowledge(gateway_id, message.last_step)
            case Submit():
                requests.submit(gateway_id, message, is_draining=self._is_draining)
            case Abort():
                requests.abort(gateway_id, message)
            case Pause() | Resume():
                requests.pause(gateway_id, message)
            case Attach():
                requests.attach(gateway_id, message)
            case Keep():
                requests.keep(gateway_id, message)
            case HandedOver():
                self._succession.handed_over(gateway_id)
            case Forget():
                requests.forget(gateway_id, message)
            case GetStats():
                self._inbox.send(gateway_id, self._figures(message.query_id))
            case GetSnapshot():
                self._inbox.send(gateway_id, self._snapshots.answer(message.query_id))
            case Drain():
                if message.limit_s >= 0:  # false for NaN, too
                    self.drain(message.limit_s)
                else:
                    text = f"Drain.limit_s must be 0 or more, got {message.limit_s}"
                    self._inbox.refuse(gateway_id, "undecodable", text)
            case Hello():
                assert self._ready is not None
                self._succession.greet(gateway_id, message.epoch)
                requests.greet(gateway_id)
                self._inbox.send(gateway_id, self._ready)

    # Figures

    def _figures(self, query_id: int) -> Stats:
        now_s = self._clock()
        stats, scheduler, blocks, publisher = self._stats, self._scheduler, self._blocks, self._publisher
        gauges = {
            **figures.gauges(
                now_s,
                stats,
                scheduler,
                blocks,
                self._latency,
                publisher,
                self._inbox,
                self._requests.count_states(),
            ),
            "batch_size": stats.batch_size if self._in_flight else 0,
            "seconds_since_last_step": now_s - self._progress_s if self._has_work else 0.0,
        }
        counters = figures.counters(stats, scheduler, blocks, publisher)
        return Stats(query_id, gauges, counters, stats.histograms())
