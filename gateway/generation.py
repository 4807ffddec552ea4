"""One request's life: admit → encode → submit → deltas → finish. Every route goes through here."""

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import msgspec

from gateway.admission import Admission, UnknownModel
from gateway.answers import AnswerForm, form_of
from gateway.auth import Caller
from gateway.cursor import FROM_START, Cursor
from gateway.engine_client import EngineClient, EngineUnavailable
from gateway.failures import UnknownStream
from gateway.metrics import GatewayMetrics
from gateway.outlet import AbandonedOutlet, NoOutlet, Outlet, Usage
from gateway.parsers.answer_parser import Parsing
from gateway.parsers.model_formats import ModelFormats, find_formats
from gateway.parsers.outlet import ParsingOutlet
from gateway.parsers.planning import plan_grammar, plan_parsing
from gateway.reception import Reception
from gateway.schema.chat import ChatRequest
from gateway.schema.completion import CompletionRequest
from gateway.schema.options import RequestLimits
from gateway.stream_group import StreamGroup
from gateway.stream_state import StreamState
from gateway.streams import Stream, new_stream_id
from gateway.tokenizer import Tokenizer
from streamkv.config import GatewayConfig
from streamkv.errors import InvalidField
from streamkv.log import fields
from streamkv.protocol import Attached, Finished

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
    prompt_token_ids: Sequence[int]
    form: AnswerForm
    tokenizer: Tokenizer
    arrived: float
    caller: Caller
    echo_text: str | None = None
    """As in Stream.begin."""

    @property
    def num_choices(self) -> int:
        return self.state.sampling.n


def _parse(outlet: Outlet, state: StreamState) -> ParsingOutlet:
    assert state.parsing is not None
    return ParsingOutlet(outlet, state.parsing, state.sampling.n)


class Generation:
    """Makes streams of requests, and knows the live ones."""

    def __init__(
        self,
        config: GatewayConfig,
        engine: EngineClient,
        tokenizer: TokenizerSource,
        admission: Admission,
        metrics: GatewayMetrics,
        reception: Reception,
    ) -> None:
        self._config = config
        self._engine = engine
        self._tokenizer = tokenizer
        self._formats: ModelFormats | None = None
        """The tokenizer's; found with the first chat."""
        self._admission = admission
        self._metrics = metrics
        self._reception = reception
        self._live: dict[bytes, Stream] = {}
        self._timers: dict[bytes, asyncio.TimerHandle] = {}
        self._unattended: set[bytes] = set()
        """Live ones that nobody reads."""
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

    async def prepare(self, request: Request, caller: Caller) -> Prepared:
        """Check, encode and wait for the engine. Raises InvalidField, UnknownModel, EngineUnavailable, ModelError.

        caller: whose share of the engine and, unless it shares, whose prefix cache it uses. Of several prompts only the
        first is taken: `prepare_each` takes all.
        """
        arrived = asyncio.get_running_loop().time()
        self._admission.check()
        options = request.options
        self.check_model(options.model)
        tokenizer = await self._tokenizer.get()
        max_tokens = self._engine.ready.model.max_model_len if self._engine.ready is not None else 0
        field = options.prompt_field
        echo_text: str | None = None
        if isinstance(request, ChatRequest):
            found_ids = await tokenizer.encode_chat_off_loop(
                request.messages,
                add_generation_prompt=request.add_generation_prompt,
                continue_final_message=request.continue_final_message,
                template_kwargs=request.chat_template_kwargs,
                tools=request.tool_use.as_tools(),
                max_tokens=max_tokens,
            )
        else:
            prompt = request.prompts[0]
            if isinstance(prompt, str):
                echo_text = prompt
                found_ids = await tokenizer.encode_off_loop(
                    prompt, field, add_special_tokens=request.add_special_tokens, max_tokens=max_tokens
                )
            else:
                found_ids = list(prompt)
        prompt_token_ids = await tokenizer.compact_off_loop(found_ids)
        if not prompt_token_ids:
            raise InvalidField(field, "gives no tokens at all; send some text")
        ready = await self._admission.enter(len(prompt_token_ids))
        self._check_fit()
        self.check_model(options.model)
        vocab_size = ready.model.vocab_size
        # Beyond the model's can only be a client's own ids, and those of a tokenizer that has more.
        may_be_beyond = echo_text is None or tokenizer.vocab_size > vocab_size
        if not isinstance(request, ChatRequest) and may_be_beyond and (highest := max(prompt_token_ids)) >= vocab_size:
            raise InvalidField(field, f"has token id {highest}, but the model's ids end at {vocab_size - 1}")
        sampling = options.to_sampling(len(prompt_token_ids), ready.model.max_model_len, secrets.randbits(64))
        parsing: Parsing | None = None
        if isinstance(request, ChatRequest):
            if self._formats is None:
                self._formats = find_formats(tokenizer.chat_template, tokenizer.added_tokens, self._config)
            parsing = plan_parsing(request, self._formats, prompt_token_ids, tokenizer)
            if parsing is not None:
                grammar = plan_grammar(request, self._formats, parsing)
                sampling = msgspec.structs.replace(sampling, grammar=grammar)
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
            attach_grace_s=min(options.attach_grace_s, ready.max_attach_grace_s),
            label=options.request_id or caller.request_id,
            key=caller.name,
            shares_prefix=caller.shares_prefix,
            echo=options.echo,
            is_prompt_only=options.is_prompt_only,
            num_prompt_logprobs=options.prompt_logprobs,
            tokens_as_ids=options.tokens_as_ids,
            parsing=parsing,
            answer_id=("cmpl-" if isinstance(request, CompletionRequest) else "chatcmpl-")
            + (options.request_id or secrets.token_hex(16)),
            created=int(time.time()),
            include_usage=options.include_usage,
            continuous_usage=options.continuous_usage_stats,
        )
        form = form_of(state, prompt_token_ids)
        return Prepared(state, prompt_token_ids, form, tokenizer, arrived, caller, echo_text)

    async def prepare_each(self, request: Request, caller: Caller) -> list[Prepared]:
        """As prepare, for each prompt of a completion. What is wrong with one is said of its place in the list."""
        if isinstance(request, ChatRequest) or len(request.prompts) == 1:
            return [await self.prepare(request, caller)]
        every: list[Prepared] = []
        for index, prompt in enumerate(request.prompts):
            options = msgspec.structs.replace(request.options, prompt_field=f"prompt[{index}]")
            single = msgspec.structs.replace(request, options=options, prompts=(prompt,))
            every.append(await self.prepare(single, caller))
        return every

    def start(self, prepared: Prepared, outlet: Outlet) -> Stream:
        """Submit it. Its owner cancels the stream when its client goes."""
        stream = self._new_stream(
            new_stream_id(), prepared.tokenizer, outlet, prepared.arrived, known=FROM_START, tenant=prepared.state.key
        )
        self._reception.began(stream, prepared.caller)
        try:
            stream.begin(prepared.state, prepared.prompt_token_ids, prepared.echo_text)
        except BaseException:
            self._remove(stream)
            raise
        self._metrics.num_prompt_tokens += len(prepared.prompt_token_ids)
        self._reception.submitted(stream)
        return stream

    def start_each(self, every: list[Prepared], outlet: Outlet) -> Stream | StreamGroup:
        """Submit each prompt of one request. Its owner leaves it when its client goes."""
        if len(every) == 1:
            return self.start(every[0], outlet)
        group = StreamGroup(outlet, len(every), every[0].num_choices)
        try:
            for prepared, part in zip(every, group.parts, strict=True):
                if group.failure is None:
                    group.add(self.start(prepared, part))
                else:
                    part.close(Usage(0, 0), None)
        except BaseException:
            group.cancel("cancelled")
            raise
        return group

    async def attach(self, stream_id: bytes, known: Cursor, outlet: Outlet, caller: Caller) -> Stream:
        """Take up a caller's live or recently ended stream, here or at another gateway, behind what its client has.
        Who had it gets an end by `abort`.

        Returns when it has come, or has failed (its `failure`, which the outlet was told). Raises EngineUnavailable,
        UnknownStream, and InvalidField for a cursor that is not one of this stream, which goes on.
        """
        tokenizer = await self._tokenizer.get()
        self._expect(stream_id, caller)
        await self._admission.enter()
        self._check_fit()
        while (old := self._live.get(stream_id)) is not None and old.state is None:
            await asyncio.wait([old.started])  # an attach, of which only the engine knows whether it is the owner's
            await self._admission.enter()  # who is handed over to nobody would run on unread
        if old is not None:
            if old.tenant != caller.name:
                raise UnknownStream("no such stream, or it may not be attached to")
            old.check_known(known)
            old.hand_over()
        stream = self._new_stream(
            stream_id,
            tokenizer,
            outlet,
            asyncio.get_running_loop().time(),
            known=known,
            tenant=caller.name,
            inherits=old.remains() if old is not None else self._engine.ended.find(stream_id, caller.name),
        )
        stream.request_id = caller.request_id
        self._reception.joined(stream, caller)
        try:
            stream.begin_attach()
        except BaseException:
            self._remove(stream)
            raise
        self._metrics.num_attached += 1
        try:
            await asyncio.wait([stream.started])
            if stream.refusal is not None:
                raise stream.refusal
        except BaseException:
            self.leave(stream)
            raise
        return stream

    async def cancel(self, stream_id: bytes, caller: Caller) -> None:
        """End a caller's stream, wherever it is, and keep nothing of it, also of one that had ended before. Raises
        EngineUnavailable, UnknownStream."""
        stream = self._live.get(stream_id)
        if stream is None or stream.tenant != caller.name or stream.state is None:
            stream = await self.attach(stream_id, FROM_START, NoOutlet(), caller)
        if stream.failure is not None and stream.state is None:
            raise stream.failure  # it was not found
        stream.cancel("cancelled")
        self._engine.forget(stream_id, caller.name)

    def _new_stream(
        self,
        stream_id: bytes,
        tokenizer: Tokenizer,
        outlet: Outlet,
        arrived: float,
        *,
        known: Cursor,
        tenant: str,
        inherits: Attached | None = None,
    ) -> Stream:
        stream = Stream(
            self._engine,
            tokenizer,
            outlet,
            stream_id=stream_id,
            arrived=arrived,
            on_end=self._on_end,
            known=known,
            tenant=tenant,
            parse=_parse,
            inherits=inherits,
        )
        loop = asyncio.get_running_loop()
        self._live[stream_id] = stream
        self._timers[stream_id] = loop.call_at(
            arrived + self._config.request_timeout_s, stream.expire, self._config.request_timeout_s
        )
        self._became_idle.clear()
        self._metrics.num_streams_begun += 1
        return stream

    def leave(self, stream: Stream | StreamGroup) -> None:
        """Its client is gone: abort it, or let it go on for its grace period, so that somebody can attach to it."""
        if isinstance(stream, StreamGroup):
            for part in stream.streams:
                self.leave(part)
            return
        state = stream.state
        if stream.is_done:
            return
        if state is None:
            stream.redirect(AbandonedOutlet(partial(self.leave, stream)))
            return
        if not state.attach_grace_s:
            stream.cancel("disconnected")
            return
        stream.redirect(NoOutlet())
        stream.resume("slow reader")
        stream.resume("credit")
        self._unattended.add(stream.stream_id)
        self._end_after(stream, state.attach_grace_s)

    def _expect(self, stream_id: bytes, caller: Caller) -> None:
        """Somebody is there for a stream, and may have to wait for the engine: its grace period begins anew behind
        that."""
        stream = self._live.get(stream_id)
        if stream is None or stream.state is None or stream.tenant != caller.name:
            return
        if stream_id in self._unattended:
            self._end_after(stream, self._config.startup_wait_s + stream.state.attach_grace_s)

    def _end_after(self, stream: Stream, delay_s: float) -> None:
        """When nobody attaches to it until then."""
        self._timers[stream.stream_id].cancel()
        self._timers[stream.stream_id] = asyncio.get_running_loop().call_later(delay_s, stream.cancel, "disconnected")

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
        """End every live stream with `abort`. Those that somebody may attach to go on in the engine: their clients see
        no end, but a connection that breaks."""
        for stream in list(self._live.values()):
            if stream.state is not None and stream.state.attach_grace_s:
                stream.let_go()
            else:
                stream.cancel(cause)

    def _remove(self, stream: Stream) -> None:
        """It is not live any more, if it was."""
        if self._live.get(stream.stream_id) is stream:
            del self._live[stream.stream_id]
            self._unattended.discard(stream.stream_id)
            self._timers.pop(stream.stream_id).cancel()
            self._reception.ended(stream)
            if not self._live:
                self._became_idle.set()

    def _on_end(self, stream: Stream) -> None:
        self._remove(stream)
        metrics, times = self._metrics, stream.times
        num_output = stream.num_output
        metrics.num_output_tokens += max(0, num_output - stream.num_inherited)
        state = stream.state
        if state is not None and state.attach_grace_s and stream.has_ended_by_itself:
            grace_s = min(state.attach_grace_s, stream.kept_until_s - asyncio.get_running_loop().time())
            self._engine.ended.keep(_with_all_ends(stream.remains()), stream.tenant, grace_s)
        reason = stream.endings[0].finish_reason if stream.endings else "error"
        cause = stream.endings[0].cause if stream.endings else ""
        metrics.outcomes[reason] += 1
        if reason == "abort":
            metrics.aborts[cause] += 1
        # Tokens of ranked choices come all at the end, and those that were there when a stream was taken up at once, so
        # they have neither time.
        is_ranked = stream.state is not None and stream.state.sampling.ranks_choices
        if times.first_token and not is_ranked and not stream.num_inherited:
            metrics.ttft.observe(times.first_token - times.arrived)
            if num_output > 1:
                metrics.tpot.observe((times.ended - times.first_token) / (num_output - 1))
        metrics.e2e.observe(times.ended - times.arrived)
        logger.info(
            "request ended",
            extra=fields(
                request_id=(stream.state.label if stream.state is not None else "") or stream.request_id,
                key=stream.tenant or None,
                reason=reason,
                cause=cause or None,
                num_prompt=stream.num_prompt,
                num_output=num_output,
                seconds=times.ended - times.arrived,
            ),
        )


def _with_all_ends(remains: Attached) -> Attached:
    """Choices that ended at a stop string did so here, and the engine was asked to abort them: with the ends that it
    would tell of."""
    known = {end.choice for end in remains.finished}
    others = [choice for choice in range(len(remains.token_ids)) if choice not in known]
    stopped = [Finished(0, choice, "abort", "stop_string") for choice in others]
    return msgspec.structs.replace(remains, finished=[*remains.finished, *stopped])
