"""OpenAI's answers as bytes, made of parts that are encoded once per request: whole bodies and the events of a stream.

Text arrives JSON-escaped (`Outlet`), so that it is put between two parts and never passes an encoder again.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from gateway.streams import Ending, Stream, Usage
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
    prompt_token_ids: tuple[int, ...] | None = None
    """Not None: token ids are wanted, those of the prompt and of each delta."""

    @property
    def wants_ids(self) -> bool:
        return self.prompt_token_ids is not None


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
        in_choice, beside = _prompt_ids(form) if with_prompt_ids else (b"", b"")
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

    def delta(self, choice: int, text: bytes, token_ids: Sequence[int], usage: Usage | None) -> bytes:
        """A delta with all that was asked for; `text_head + text + text_tail` is the same, without."""
        form = self._form
        closer = b'"}' if form.is_chat else b'"'
        ids = b',"token_ids":' + json_bytes(token_ids) if form.wants_ids else b""
        tail = b',"usage":' + json_bytes(usage_fields(usage)) if usage is not None else self._tail
        return (
            self.text_head(choice)
            + text
            + closer
            + b',"logprobs":null,"finish_reason":null'
            + ids
            + b"}]"
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
KEEP_ALIVE = b": keep-alive\n\n"


def _prompt_ids(form: AnswerForm) -> tuple[bytes, bytes]:
    """The prompt's ids, where they are wanted, as vLLM places them: (in each choice, beside the choices)."""
    if not form.wants_ids:
        return b"", b""
    ids = b',"prompt_token_ids":' + json_bytes(form.prompt_token_ids)
    return (b"", ids) if form.is_chat else (ids, b"")


def error_event(body: bytes) -> bytes:
    """An error after the first byte, in the form of an error body."""
    return b"data: " + body + b"\n\n"


def _ending(ending: Ending) -> bytes:
    return b',"finish_reason":"' + ending.finish_reason.encode() + b'","stop_reason":' + json_bytes(ending.stop_reason)


@dataclass(slots=True)
class _GatheredChoice:
    texts: list[bytes] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    ending: Ending | None = None


class GatheredAnswer:
    """An outlet that keeps everything until the end, for an answer that is not streamed."""

    def __init__(self, num_choices: int) -> None:
        self._choices = [_GatheredChoice() for _ in range(num_choices)]
        self.usage: Usage | None = None

    def begin(self, stream: Stream) -> None: ...

    def piece(self, choice: int, text: bytes, token_id: int) -> None:
        gathered = self._choices[choice]
        gathered.texts.append(text)
        gathered.token_ids.append(token_id)

    def delta(self, choice: int, text: bytes, token_ids: Sequence[int]) -> None:
        gathered = self._choices[choice]
        gathered.texts.append(text)
        gathered.token_ids.extend(token_ids)

    def end(self, choice: int, ending: Ending) -> None:
        self._choices[choice].ending = ending

    def flush(self) -> None: ...

    def close(self, usage: Usage, failure: StreamKVError | None) -> None:
        self.usage = usage

    def body(self, form: AnswerForm) -> bytes:
        """The whole answer, once it is closed."""
        assert self.usage is not None
        kind = b"chat.completion" if form.is_chat else b"text_completion"
        choices = b",".join(self._choice(index, form) for index in range(len(self._choices)))
        return (
            b'{"id":' + json_bytes(form.answer_id) + b',"object":"' + kind + b'","created":%d' % form.created
            + b',"model":' + json_bytes(form.model) + b',"choices":[' + choices + b"]" + _prompt_ids(form)[1]
            + b',"usage":' + json_bytes(usage_fields(self.usage)) + b"}"
        )  # fmt: skip

    def _choice(self, index: int, form: AnswerForm) -> bytes:
        gathered = self._choices[index]
        text = b'"' + b"".join(gathered.texts) + b'"'
        body = b'"message":{"role":"assistant","content":' + text + b"}" if form.is_chat else b'"text":' + text
        ids = b',"token_ids":' + json_bytes(gathered.token_ids) if form.wants_ids else b""
        ids += _prompt_ids(form)[0]
        assert gathered.ending is not None
        return b'{"index":%d,' % index + body + b',"logprobs":null' + _ending(gathered.ending) + ids + b"}"
