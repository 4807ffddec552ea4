"""OpenAI's answers as bytes, made of parts that are encoded once per request: whole bodies and the events of a stream.

Text arrives JSON-escaped (`Outlet`), so that it is put between two parts and never passes an encoder again.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import msgspec

from gateway.deltas import Delta, TokenLogprob, ToolCallDelta
from gateway.logprobs import LogprobForms
from gateway.outlet import Ending, StreamFacts, Usage
from gateway.stream_state import StreamState
from streamkv.errors import StreamKVError

_NO_USAGE = b',"usage":null'


def json_bytes(value: object) -> bytes:
    """JSON without a space that could be left out."""
    return msgspec.json.encode(value)


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """What every part of one answer repeats, and what its client asked to be told."""

    is_chat: bool
    answer_id: str
    """chatcmpl-… or cmpl-…"""
    created: int
    """Unix time, s."""
    model: str
    num_prompt: int
    include_usage: bool = False
    continuous_usage: bool = False
    prompt_token_ids: tuple[tuple[int, ...], ...] | None = None
    """Not None: token ids are wanted, those of each prompt and of each delta."""
    num_prompts: int = 1
    """Prompts of one completion; the choices of the first come first, then those of the second."""
    n: int = 1
    """Choices of each prompt."""

    @property
    def wants_ids(self) -> bool:
        return self.prompt_token_ids is not None

    @property
    def num_choices(self) -> int:
        return self.num_prompts * self.n


def form_of(state: StreamState, prompt_token_ids: Sequence[int]) -> AnswerForm:
    """The same at every gateway that the stream comes to."""
    return AnswerForm(
        is_chat=state.is_chat,
        answer_id=state.answer_id,
        created=state.created,
        model=state.model,
        num_prompt=len(prompt_token_ids),
        include_usage=state.include_usage,
        continuous_usage=state.continuous_usage,
        prompt_token_ids=(tuple(prompt_token_ids),) if state.return_token_ids else None,
        n=state.sampling.n,
    )


def form_of_all(forms: Sequence[AnswerForm]) -> AnswerForm:
    """One answer to several prompts that were prepared alone, each with as many choices."""
    first = forms[0]
    wants_ids = all(form.prompt_token_ids is not None for form in forms)
    return replace(
        first,
        num_prompt=sum(form.num_prompt for form in forms),
        prompt_token_ids=tuple(ids for form in forms for ids in form.prompt_token_ids or ()) if wants_ids else None,
        num_prompts=len(forms),
    )


def usage_fields(usage: Usage) -> dict[str, object]:
    """OpenAI's `usage`."""
    return {
        "prompt_tokens": usage.num_prompt,
        "completion_tokens": usage.num_output,
        "total_tokens": usage.num_prompt + usage.num_output,
        "prompt_tokens_details": {"cached_tokens": usage.num_cached},
    }


class EventParts:
    """The pieces of one stream's `data:` lines; joined around a text they make an event, blank line included."""

    def __init__(self, form: AnswerForm) -> None:
        self._form = form
        kind = b"chat.completion.chunk" if form.is_chat else b"text_completion"
        self._head = (
            b'data: {"id":' + json_bytes(form.answer_id) + b',"object":"' + kind + b'","created":%d' % form.created
            + b',"model":' + json_bytes(form.model)
        )  # fmt: skip
        self._tail = _NO_USAGE if form.include_usage else b""
        self.text_tail = (
            (b'"}' if form.is_chat else b'"') + b',"logprobs":null,"finish_reason":null}]' + self._tail + b"}\n\n"
        )

    def text_head(self, choice: int) -> bytes:
        """What stands before a delta's text."""
        opener = b'"delta":{"content":"' if self._form.is_chat else b'"text":"'
        return self._choice_head(choice) + opener

    def opening(self, choice: int, with_prompt_ids: bool) -> bytes:
        """A choice's first event, with no text: the role of a chat message, and the prompt's ids where they are due."""
        form = self._form
        body = b'"delta":{"role":"assistant","content":""}' if form.is_chat else b'"text":""'
        in_choice, beside = _prompt_ids(form, choice) if with_prompt_ids else (b"", b"")
        return (
            self._choice_head(choice)
            + body
            + b',"logprobs":null,"finish_reason":null'
            + in_choice
            + b"}]"
            + beside
            + self._tail
            + b"}\n\n"
        )

    def delta(self, choice: int, delta: Delta, usage: Usage | None, forms: LogprobForms | None) -> bytes:
        """A delta with all that was asked for; `text_head + text + text_tail` is the same, without."""
        form = self._form
        body = b'"delta":' + _chat_delta(delta) if form.is_chat else b'"text":"' + delta.text + b'"'
        ids = b',"token_ids":' + json_bytes(delta.token_ids) if form.wants_ids else b""
        in_choice, beside = _prompt_logprobs(form, delta.prompt_logprobs, forms)
        tail = b',"usage":' + json_bytes(usage_fields(usage)) if usage is not None else self._tail
        return (
            self._choice_head(choice)
            + body
            + b',"logprobs":'
            + _logprobs(form, delta.logprobs, forms)
            + b',"finish_reason":null'
            + ids
            + in_choice
            + b"}]"
            + beside
            + tail
            + b"}\n\n"
        )

    def end(self, choice: int, ending: Ending, usage: Usage | None) -> bytes:
        """A choice's terminal event."""
        body = b'"delta":{}' if self._form.is_chat else b'"text":""'
        tail = b',"usage":' + json_bytes(usage_fields(usage)) if usage is not None else self._tail
        return self._choice_head(choice) + body + b',"logprobs":null' + _ending(ending) + b"}]" + tail + b"}\n\n"

    def usage(self, usage: Usage) -> bytes:
        """The event that `stream_options.include_usage` asks for."""
        return self._head + b',"choices":[],"usage":' + json_bytes(usage_fields(usage)) + b"}\n\n"

    def _choice_head(self, choice: int) -> bytes:
        return self._head + b',"choices":[{"index":%d,' % choice


DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n"
"""No blank line behind it: it would end an event, and clients that keep the last id make one of that alone."""


def _prompt_ids(form: AnswerForm, choice: int) -> tuple[bytes, bytes]:
    """The prompt's ids, where they are wanted, as vLLM places them: (in each choice, beside the choices)."""
    if form.prompt_token_ids is None:
        return b"", b""
    ids = b',"prompt_token_ids":' + json_bytes(form.prompt_token_ids[choice // form.n])
    return (b"", ids) if form.is_chat else (ids, b"")


def _prompt_logprobs(
    form: AnswerForm, entries: Sequence[TokenLogprob] | None, forms: LogprobForms | None
) -> tuple[bytes, bytes]:
    """The prompt's log probabilities, where they are wanted, in the same places."""
    if entries is None or forms is None:
        return b"", b""
    found = b',"prompt_logprobs":' + json_bytes(forms.prompt(entries))
    return (b"", found) if form.is_chat else (found, b"")


def _logprobs(form: AnswerForm, entries: Sequence[TokenLogprob], forms: LogprobForms | None) -> bytes:
    if not entries or forms is None:
        return b"null"
    if form.is_chat:
        return b'{"content":' + json_bytes(forms.chat(entries)) + b',"refusal":null}'
    return json_bytes(forms.completion(entries))


def _chat_delta(delta: Delta) -> bytes:
    """The `delta` of a chat: only what is new in it, or an empty content."""
    members = []
    if delta.reasoning:
        members.append(_reasoning(delta.reasoning))
    if delta.tool_calls:
        members.append(b'"tool_calls":[' + b",".join(map(_tool_call_delta, delta.tool_calls)) + b"]")
    if delta.text or not members:
        members.append(b'"content":"' + delta.text + b'"')
    return b"{" + b",".join(members) + b"}"


def _reasoning(text: bytes) -> bytes:
    """Under both names that clients look for."""
    return b'"reasoning":"' + text + b'","reasoning_content":"' + text + b'"'


def _tool_call_delta(call: ToolCallDelta) -> bytes:
    function = b'"arguments":"' + call.arguments + b'"}'
    if not call.call_id:
        return b'{"index":%d,"function":{' % call.index + function + b"}"
    return (
        b'{"index":%d,"id":' % call.index
        + json_bytes(call.call_id)
        + b',"type":"function","function":{"name":'
        + json_bytes(call.name)
        + b","
        + function
        + b"}"
    )


def error_event(body: bytes) -> bytes:
    """An error after the first byte, in the form of an error body."""
    return b"data: " + body + b"\n\n"


def _ending(ending: Ending) -> bytes:
    return b',"finish_reason":"' + ending.finish_reason.encode() + b'","stop_reason":' + json_bytes(ending.stop_reason)


@dataclass(slots=True)
class _GatheredCall:
    call_id: str
    name: str
    arguments: list[bytes] = field(default_factory=list)


@dataclass(slots=True)
class _GatheredChoice:
    texts: list[bytes] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: Sequence[TokenLogprob] | None = None
    reasoning: list[bytes] = field(default_factory=list)
    tool_calls: list[_GatheredCall] = field(default_factory=list)
    ending: Ending | None = None

    def chat_message(self) -> bytes:
        """The `message` of a chat. Content is null beside tool calls and reasoning where there is no text."""
        text = b"".join(self.texts)
        has_more = bool(self.tool_calls or self.reasoning)
        content = b"null" if has_more and not text else b'"' + text + b'"'
        reasoning = b"," + _reasoning(b"".join(self.reasoning)) if self.reasoning else b""
        calls = b",".join(
            b'{"id":'
            + json_bytes(call.call_id)
            + b',"type":"function","function":{"name":'
            + json_bytes(call.name)
            + b',"arguments":"'
            + b"".join(call.arguments)
            + b'"}}'
            for call in self.tool_calls
        )
        tool_calls = b',"tool_calls":[' + calls + b"]" if calls else b""
        return b'{"role":"assistant","content":' + content + reasoning + tool_calls + b"}"


class GatheredAnswer:
    """An outlet that keeps everything until the end, for an answer that is not streamed."""

    def __init__(self, num_choices: int) -> None:
        self._choices = [_GatheredChoice() for _ in range(num_choices)]
        self._forms: LogprobForms | None = None
        self.usage: Usage | None = None

    def begin(self, stream: StreamFacts) -> None:
        self._forms = stream.logprob_forms

    def piece(self, choice: int, text: bytes, token_id: int) -> None:
        gathered = self._choices[choice]
        gathered.texts.append(text)
        gathered.token_ids.append(token_id)

    def delta(self, choice: int, delta: Delta) -> None:
        gathered = self._choices[choice]
        gathered.texts.append(delta.text)
        gathered.token_ids.extend(delta.token_ids)
        gathered.logprobs.extend(delta.logprobs)
        if delta.prompt_logprobs is not None:
            gathered.prompt_logprobs = delta.prompt_logprobs
        if delta.reasoning:
            gathered.reasoning.append(delta.reasoning)
        for call in delta.tool_calls:
            if call.call_id:
                gathered.tool_calls.append(_GatheredCall(call.call_id, call.name))
            gathered.tool_calls[call.index].arguments.append(call.arguments)

    def end(self, choice: int, ending: Ending) -> None:
        self._choices[choice].ending = ending

    def flush(self) -> None: ...

    def close(self, usage: Usage, failure: StreamKVError | None) -> None:
        self.usage = usage

    @property
    def num_logprobs(self) -> int:
        """Tokens, of prompts and answers, whose log probabilities are told."""
        return sum(len(choice.logprobs) + len(choice.prompt_logprobs or ()) for choice in self._choices)

    def body(self, form: AnswerForm) -> bytes:
        """The whole answer, once it is closed."""
        assert self.usage is not None
        kind = b"chat.completion" if form.is_chat else b"text_completion"
        choices = b",".join(self._choice(index, form) for index in range(len(self._choices)))
        beside = _prompt_ids(form, 0)[1] + _prompt_logprobs(form, self._choices[0].prompt_logprobs, self._forms)[1]
        return (
            b'{"id":' + json_bytes(form.answer_id) + b',"object":"' + kind + b'","created":%d' % form.created
            + b',"model":' + json_bytes(form.model) + b',"choices":[' + choices + b"]" + beside
            + b',"usage":' + json_bytes(usage_fields(self.usage)) + b"}"
        )  # fmt: skip

    def _choice(self, index: int, form: AnswerForm) -> bytes:
        gathered = self._choices[index]
        if form.is_chat:
            body = b'"message":' + gathered.chat_message()
        else:
            body = b'"text":"' + b"".join(gathered.texts) + b'"'
        asked = b',"token_ids":' + json_bytes(gathered.token_ids) if form.wants_ids else b""
        asked += _prompt_ids(form, index)[0] + _prompt_logprobs(form, gathered.prompt_logprobs, self._forms)[0]
        logprobs = _logprobs(form, gathered.logprobs, self._forms)
        assert gathered.ending is not None
        return b'{"index":%d,' % index + body + b',"logprobs":' + logprobs + _ending(gathered.ending) + asked + b"}"
