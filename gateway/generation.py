"""One request's life: admit → encode → submit → deltas → finish. Every route goes through here."""

import asyncio
import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from gateway.admission import Admission, UnknownModel
from gateway.answers import AnswerForm
from gateway.auth import Caller
from gateway.engine_client import EngineClient, EngineUnavailable
from gateway.metrics import GatewayMetrics
from gateway.schema import ChatRequest, CompletionRequest, RequestLimits
from gateway.streams import AbandonedOutlet, NoOutlet, Outlet, Stream, StreamState, UnknownStream, new_stream_id
from gateway.tokenizer import Tokenizer
from streamkv.config import GatewayConfig
from streamkv.errors import InvalidField
from streamkv.log import fields

logger = logging.getLogger(__name__)

MISFIT_RETRY_S: Final = 30.0
"""Somebody has to start one of the two with another model first."""

Request = ChatRequest | CompletionRequest


class TokenizerSource:
    """The tokenizer, which loads while the port is open already."""

    def __init__(self, load: Callable[[], Tokenizer]) -> None:
        """load: slow, called once on a thread."""
        self._load = load
        self._task: asyncio.Task[Tokenizer] | None = None

    def start(self) -> "asyncio.Task[Tokenizer]":
        """Begin to load, on the running loop."""
        if self._task is None:
            self._task = asyncio.create_task(asyncio.to_thread(self._load))
        return self._task

    @property
    def is_loaded(self) -> bool:
        task = self._task
        return task is not None and task.done() and not task.cancelled() and task.exception() is None

    @property
    def loaded(self) -> Tokenizer | None:
        """None while it loads, and when it cannot be loaded."""
        return self._task.result() if self._task is not None and self.is_loaded else None

    async def get(self) -> Tokenizer:
        """Raises ModelError when it cannot be loaded."""
        return await asyncio.shield(self.start())

    def close(self) -> None:
        if self._task is not None and self.is_loaded:
            self._task.result().close()


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request that is checked, admitted and encoded: all but its outlet."""

    state: StreamState
    prompt_token_ids: list[int]
    form: AnswerForm
    tokenizer: Tokenizer
    arrived: float

    @property
    def num_choices(self) -> int:
        return self.state.sampling.n


class Generation:
    """Makes streams of requests, and knows the live ones."""

    def __init__(
        self,
        config: GatewayConfig,
        engine: EngineClient,
        tokenizer: TokenizerSource,
        admission: Admission,
        metrics: GatewayMetrics,
    ) -> None:
        self._config = config
        self._engine = engine
        self._tokenizer = tokenizer
        self._admission = admission
        self._metrics = metrics
        self._live: dict[bytes, Stream] = {}
        self._timers: dict[bytes, asyncio.TimerHandle] = {}
        self._misfit_epoch = 0
        """The engine life whose misfit is logged."""
        self._became_idle = asyncio.Event()
        self._became_idle.set()

    @property
    def num_live(self) -> int:
        return len(self._live)

    @property
    def model_name(self) -> str:
        """What clients call the model; empty until the engine has said it."""
        ready = self._engine.ready
        return self._config.served_model_name or (ready.model.name if ready is not None else "")

    @property
    def misfit(self) -> str:
        """Why the engine's model and this gateway's tokenizer cannot belong together; empty while nothing says so."""
        ready, tokenizer = self._engine.ready, self._tokenizer.loaded
        if ready is None or tokenizer is None or tokenizer.fits(ready.model.vocab_size):
            return ""
        message = (
            f"the gateway's tokenizer has ids up to {tokenizer.vocab_size - 1}, but those of the engine's model "
            f"{ready.model.name} end at {ready.model.vocab_size - 1}; start both with the same model"
        )
        if self._misfit_epoch != ready.epoch:
            self._misfit_epoch = ready.epoch
            logger.error("wrong model", extra=fields(error=message))
        return message

    def _check_fit(self) -> None:
        """Raises EngineUnavailable when the engine runs another model than this gateway was started for."""
        if message := self.misfit:
            raise EngineUnavailable(message, MISFIT_RETRY_S)

    async def limits(self) -> RequestLimits:
        """What a request is checked against; of the engine's facts only what is known already."""
        tokenizer = await self._tokenizer.get()
        ready = self._engine.ready
        if ready is None:
            return RequestLimits(vocab_size=tokenizer.vocab_size)
        return RequestLimits(vocab_size=ready.model.vocab_size, max_model_len=ready.model.max_model_len)

    async def prepare(self, request: Request, caller: Caller, attach_grace_s: float = 0.0) -> Prepared:
        """Check, encode and wait for the engine. Raises InvalidField, UnknownModel, EngineUnavailable, ModelError.

        caller: whose share of the engine and, unless it shares, whose prefix cache it uses. attach_grace_s: how long
        the stream goes on without its client, for somebody to attach to it.
        """
        arrived = asyncio.get_running_loop().time()
        self._admission.check()
        options = request.options
        self.check_model(options.model)
        tokenizer = await self._tokenizer.get()
        max_tokens = self._engine.ready.model.max_model_len if self._engine.ready is not None else 0
        if isinstance(request, ChatRequest):
            prompt_token_ids = await tokenizer.encode_chat_off_loop(
                request.messages,
                add_generation_prompt=request.add_generation_prompt,
                continue_final_message=request.continue_final_message,
                template_kwargs=request.chat_template_kwargs,
                max_tokens=max_tokens,
            )
        elif isinstance(request.prompt, str):
            prompt_token_ids = await tokenizer.encode_off_loop(
                request.prompt, add_special_tokens=request.add_special_tokens, max_tokens=max_tokens
            )
        else:
            prompt_token_ids = list(request.prompt)
        field = "messages" if isinstance(request, ChatRequest) else "prompt"
        if not prompt_token_ids:
            raise InvalidField(field, "gives no tokens at all; send some text")
        ready = await self._admission.enter()
        self._check_fit()
        self.check_model(options.model)
        vocab_size = ready.model.vocab_size
        if not isinstance(request, ChatRequest) and max(prompt_token_ids) >= vocab_size:
            raise InvalidField(
                field, f"has token id {max(prompt_token_ids)}, but the model's ids end at {vocab_size - 1}"
            )
        try:
            sampling = options.to_sampling(len(prompt_token_ids), ready.model.max_model_len, secrets.randbits(64))
        except InvalidField as error:
            if error.field != "prompt":
                raise
            raise InvalidField(field, error.message) from None
        state = StreamState(
            sampling=sampling,
            model=self.model_name,
            stop=options.stop,
            include_stop_str_in_output=options.include_stop_str_in_output,
            skip_special_tokens=options.skip_special_tokens,
            return_token_ids=options.return_token_ids,
            is_chat=isinstance(request, ChatRequest),
            cache_salt=options.cache_salt,
            priority=options.priority,
            attach_grace_s=attach_grace_s,
            label=options.request_id,
            key=caller.name,
            shares_prefix=caller.shares_prefix,
        )
        form = AnswerForm(
            is_chat=state.is_chat,
            answer_id=("chatcmpl-" if state.is_chat else "cmpl-") + (options.request_id or secrets.token_hex(16)),
            created=int(time.time()),
            model=state.model,
            num_prompt=len(prompt_token_ids),
            include_usage=options.include_usage,
            continuous_usage=options.continuous_usage_stats,
            prompt_token_ids=tuple(prompt_token_ids) if options.return_token_ids else None,
        )
        return Prepared(state, prompt_token_ids, form, tokenizer, arrived)

    def start(self, prepared: Prepared, outlet: Outlet) -> Stream:
        """Submit it. Its owner cancels the stream when its client goes."""
        stream = self._new_stream(
            new_stream_id(), prepared.tokenizer, outlet, prepared.arrived, from_token=0, tenant=prepared.state.key
        )
        try:
            stream.begin(prepared.state, prepared.prompt_token_ids)
        except BaseException:
            self._remove(stream)
            raise
        self._metrics.num_prompt_tokens += len(prepared.prompt_token_ids)
        return stream

    async def attach(self, stream_id: bytes, from_token: int, outlet: Outlet, caller: Caller) -> Stream:
        """Take up a caller's live or recently ended stream, here or at another gateway. Who had it gets an end by
        `abort`.

        Its `started` tells whether it was found. Raises EngineUnavailable, UnknownStream.
        """
        tokenizer = await self._tokenizer.get()
        await self._admission.enter()
        self._check_fit()
        while (old := self._live.get(stream_id)) is not None and old.tenant != caller.name:
            if old.state is not None:
                raise UnknownStream("no such stream, or it may not be attached to")
            await asyncio.wait([old.started])  # an attach, of which only the engine knows whether it is the owner's
        if old is not None:
            old.hand_over()
        stream = self._new_stream(
            stream_id,
            tokenizer,
            outlet,
            asyncio.get_running_loop().time(),
            from_token=from_token,
            tenant=caller.name,
        )
        try:
            stream.begin_attach()
        except BaseException:
            self._remove(stream)
            raise
        self._metrics.num_attached += 1
        return stream

    def _new_stream(
        self,
        stream_id: bytes,
        tokenizer: Tokenizer,
        outlet: Outlet,
        arrived: float,
        *,
        from_token: int,
        tenant: str,
    ) -> Stream:
        stream = Stream(
            self._engine,
            tokenizer,
            outlet,
            stream_id=stream_id,
            arrived=arrived,
            on_end=self._on_end,
            from_token=from_token,
            tenant=tenant,
        )
        loop = asyncio.get_running_loop()
        self._live[stream_id] = stream
        self._timers[stream_id] = loop.call_at(
            arrived + self._config.request_timeout_s, stream.expire, self._config.request_timeout_s
        )
        self._became_idle.clear()
        self._metrics.num_streams_begun += 1
        return stream

    def leave(self, stream: Stream) -> None:
        """Its client is gone: abort it, or let it go on for its grace period, so that somebody can attach to it."""
        state = stream.state
        if stream.is_done:
            return
        if state is None:
            stream.redirect(AbandonedOutlet(self.leave))
            return
        if not state.attach_grace_s:
            stream.cancel("disconnected")
            return
        stream.redirect(NoOutlet())
        stream.resume("slow reader")
        self._timers[stream.stream_id].cancel()
        self._timers[stream.stream_id] = asyncio.get_running_loop().call_later(
            state.attach_grace_s, stream.cancel, "disconnected"
        )

    def check_model(self, name: str) -> None:
        """Raises UnknownModel for a name that is not served here; an empty one means whatever is."""
        served = self.model_name
        if name and served and name != served:
            raise UnknownModel(name, served)

    async def wait_idle(self, timeout_s: float) -> bool:
        """Whether every live stream ended in time."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._became_idle.wait()
        except TimeoutError:
            return False
        return True

    def cancel_all(self, cause: str) -> None:
        """End every live stream with `abort`."""
        for stream in list(self._live.values()):
            stream.cancel(cause)

    def _remove(self, stream: Stream) -> None:
        """It is not live any more, if it was."""
        if self._live.get(stream.stream_id) is stream:
            del self._live[stream.stream_id]
            self._timers.pop(stream.stream_id).cancel()
            if not self._live:
                self._became_idle.set()

    def _on_end(self, stream: Stream) -> None:
        self._remove(stream)
        metrics, times = self._metrics, stream.times
        num_output = stream.num_output
        metrics.num_output_tokens += num_output
        reason = stream.endings[0].finish_reason if stream.endings else "error"
        cause = stream.endings[0].cause if stream.endings else ""
        metrics.outcomes[reason] += 1
        if reason == "abort":
            metrics.aborts[cause] += 1
        # Tokens of ranked choices come all at the end, so they have neither time.
        if times.first_token and not (stream.state is not None and stream.state.sampling.ranks_choices):
            metrics.ttft.observe(times.first_token - times.arrived)
            if num_output > 1:
                metrics.tpot.observe((times.ended - times.first_token) / (num_output - 1))
        metrics.e2e.observe(times.ended - times.arrived)
        logger.info(
            "request ended",
            extra=fields(
                request_id=(stream.state.label if stream.state is not None else "") or stream.stream_id.hex()[:8],
                key=stream.tenant or None,
                reason=reason,
                cause=cause or None,
                num_prompt=stream.num_prompt,
                num_output=num_output,
                seconds=times.ended - times.arrived,
            ),
        )
