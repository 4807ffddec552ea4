"""The OpenAPI 3.1 document of every route."""

from typing import Final

from gateway.openapi import requests
from gateway.openapi.answers import ANSWERS
from gateway.openapi.parts import PARTS
from gateway.openapi.rules import Schema, record, ref
from gateway.schema.options import MAX_ATTACH_GRACE_S

API_VERSION: Final = "1"
"""Of what the document describes: grows when a client that worked would not any more."""

_CHAT_STREAM: Final = (
    "Server-sent events. Each `data:` line is a chunk: as the whole answer, but with `delta` instead of `message`, or "
    "with only the new part of `text`. A choice ends with the one chunk that has its `finish_reason`; with "
    "`stream_options.include_usage` a chunk follows that has `usage` and no choices; the last line is `data: [DONE]`. "
    "An error after the first event is a `data:` line with `error`. Lines that begin with a colon are comments, which "
    "keep the connection open."
)
_RESPONSE_STREAM: Final = (
    "Server-sent events with names: response.created, response.in_progress; for each item response.output_item.added, "
    "response.content_part.added, deltas (response.output_text.delta, response.reasoning_text.delta, "
    "response.function_call_arguments.delta), their `.done`, response.content_part.done, response.output_item.done; at "
    "last one of response.completed, response.incomplete, response.failed. Each has `type` and `sequence_number`."
)
_MESSAGE_STREAM: Final = (
    "Server-sent events with names: message_start, ping; for each block content_block_start, content_block_delta, "
    "content_block_stop; at last message_delta with stop_reason and usage, and message_stop; or else error."
)
_SOCKET: Final = "Many generations on one WebSocket"

_STATUSES: Final = {
    400: "A field breaks its rule, and is named; or the body cannot be read.",
    401: "No API key, or one that is not known.",
    403: "A web page of another site.",
    404: "No such thing.",
    408: "The body did not come in time.",
    413: "The body is over the server's limit.",
    415: "The body's Content-Type or Content-Encoding is none that is taken.",
    429: "The caller is over a limit; Retry-After says when to come back.",
    500: "A fault of the server, or of the engine on this request.",
    503: "The engine is not ready, or the server is full; Retry-After says when to come back.",
    504: "The request took longer than the server allows.",
}
_ALWAYS: Final = (401, 429)
_OF_BODIES: Final = (400, 404, 408, 413, 415, 500, 503, 504)


def document() -> Schema:
    """The whole document."""
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "StreamKV",
            "version": API_VERSION,
            "description": "A language model for many streaming clients, by the APIs of OpenAI and Anthropic. Fields "
            "with `x-support: refused` are taken only with values that change nothing, those with `ignored` have no "
            "effect. Null is the same as leaving a field out. A field that is not listed is refused by its name.",
        },
        "paths": _PATHS,
        "components": {
            "schemas": {**PARTS, **ANSWERS},
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
        "security": [{}, {"bearer": []}, {"key": []}],
    }


def _content(schema: Schema, stream: str = "") -> dict[str, object]:
    found: dict[str, object] = {"application/json": {"schema": schema}}
    if stream:
        found["text/event-stream"] = {"schema": {"description": stream}}
    return found


def _responses(successes: Schema, statuses: tuple[int, ...], error: str = "Error") -> Schema:
    """Status → answer: the successes, and errors with these statuses."""
    failures: Schema = {
        str(status): {"description": _STATUSES[status], "content": _content(ref(error))} for status in sorted(statuses)
    }
    return successes | failures


def _post(
    name: str,
    summary: str,
    fields: dict[str, Schema],
    required: tuple[str, ...],
    answer: str,
    *,
    stream: str = "",
    error: str = "Error",
    headers: tuple[Schema, ...] = (),
) -> Schema:
    """A path that takes a JSON body."""
    described = "The answer, whole or as it is made." if stream else "The answer."
    succeeded: Schema = {"description": described, "content": _content(ref(answer), stream)}
    return {
        "post": {
            "operationId": name,
            "summary": summary,
            "parameters": list(headers),
            "requestBody": {
                "required": True,
                "content": {"application/json": {"schema": record(fields, required)}},
            },
            "responses": _responses({"200": succeeded}, _ALWAYS + _OF_BODIES, error),
        }
    }


def _get(
    name: str,
    summary: str,
    content: dict[str, object],
    failures: tuple[int, ...] = (),
    *,
    parameter: str = "",
    is_open: bool = False,
    others: dict[str, object] | None = None,
) -> Schema:
    """parameter: the name of the one in the path. is_open: no API key is needed. others: answers beside 200."""
    operation: Schema = {
        "operationId": name,
        "summary": summary,
        "responses": _responses(
            {"200": {"description": "The answer.", "content": content}, **(others or {})},
            failures if is_open else (*_ALWAYS, *failures),
        ),
    }
    if parameter:
        operation["parameters"] = [
            {"name": parameter, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        ]
    if is_open:
        operation["security"] = []
    return {"get": operation}


def _page(name: str, summary: str) -> Schema:
    return _get(name, summary, {"text/html": {"schema": {"type": "string"}}}, is_open=True, others=_UNCHANGED)


_UNCHANGED: Final[dict[str, object]] = {"304": {"description": "The client has it: its ETag is the same."}}

_STREAM_ID: Final[Schema] = {
    "name": "stream_id",
    "in": "path",
    "required": True,
    "schema": {"type": "string", "pattern": "^[0-9a-f]{32}$"},
}
_LAST_EVENT_ID: Final[Schema] = {"name": "Last-Event-ID", "in": "header", "schema": {"type": "string"}}
_REATTACH: Final[tuple[Schema, ...]] = (
    {**_LAST_EVENT_ID, "description": "Go on with a stream behind this event; the body is not looked at."},
    {
        "name": "X-Attach-Grace",
        "in": "header",
        "description": "attach_grace_s of a stream of one prompt, for clients that cannot add it to the body: a number "
        f"of seconds, 0 to {MAX_ATTACH_GRACE_S:g}.",
        "schema": {"type": "string"},
    },
)

_SOCKET_OPEN: Final[Schema] = {"description": "The socket is open."}
_REST: Final[Schema] = {
    "description": "The rest.",
    "content": {"text/event-stream": {"schema": {"description": _CHAT_STREAM}}},
}
_NOTHING_LEFT: Final[Schema] = {"description": "That was all of it."}
_ENDED: Final[Schema] = {"description": "It has ended, and nothing of it is kept."}
_STREAM: Final[Schema] = {
    "get": {
        "operationId": "attachStream",
        "summary": "What is left of a streamed answer, in the form in which it was begun",
        "parameters": [
            _STREAM_ID,
            {**_LAST_EVENT_ID, "description": "Id of the last event that was received; without it, `cursor`."},
            {
                "name": "cursor",
                "in": "query",
                "description": "The part of an event's id behind the stream's own; left out: from the beginning.",
                "schema": {"type": "string"},
            },
        ],
        "responses": _responses({"200": _REST, "204": _NOTHING_LEFT}, (*_ALWAYS, 400, 404, 500, 503, 504)),
    },
    "delete": {
        "operationId": "cancelStream",
        "summary": "End a streamed answer",
        "parameters": [_STREAM_ID],
        "responses": _responses({"204": _ENDED}, (*_ALWAYS, 400, 404, 503)),
    },
}

_PATHS: Final[dict[str, Schema]] = {
    "/v1/chat/completions": _post(
        "createChatCompletion",
        "Answer a chat",
        requests.CHAT,
        ("messages",),
        "ChatAnswer",
        stream=_CHAT_STREAM,
        headers=_REATTACH,
    ),
    "/v1/completions": _post(
        "createCompletion",
        "Continue a text or token ids",
        requests.COMPLETION,
        ("prompt",),
        "CompletionAnswer",
        stream=_CHAT_STREAM,
        headers=_REATTACH,
    ),
    "/v1/responses": _post(
        "createResponse",
        "Answer by OpenAI's Responses API",
        requests.RESPONSE,
        ("input",),
        "Response",
        stream=_RESPONSE_STREAM,
    ),
    "/v1/messages": _post(
        "createMessage",
        "Answer by Anthropic's Messages API",
        requests.MESSAGE,
        ("messages", "max_tokens"),
        "Message",
        stream=_MESSAGE_STREAM,
        error="AnthropicError",
    ),
    "/v1/messages/count_tokens": _post(
        "countMessageTokens",
        "Tokens of a message's prompt",
        requests.COUNT,
        ("messages",),
        "MessageCount",
        error="AnthropicError",
    ),
    "/v1/embeddings": {
        "post": {
            "operationId": "createEmbedding",
            "summary": "Refused: the served model generates text",
            "requestBody": {"content": {"application/json": {"schema": {}}}},
            "responses": _responses({}, (*_ALWAYS, 400)),
        }
    },
    "/v1/models": _get("listModels", "The served model, as a list of one", _content(ref("ModelList")), (503,)),
    "/v1/models/{name}": _get(
        "retrieveModel", "A model by its name", _content(ref("Model")), (404, 503), parameter="name"
    ),
    "/v1/stream": {
        "get": {
            "operationId": "openSocket",
            "summary": _SOCKET,
            "responses": _responses({"101": _SOCKET_OPEN}, (*_ALWAYS, 400, 403)),
        }
    },
    "/v1/streams/{stream_id}": _STREAM,
    "/tokenize": _post("tokenize", "A text or a chat → token ids", requests.TOKENIZE, (), "TokenizeAnswer"),
    "/detokenize": _post("detokenize", "Token ids → their text", requests.DETOKENIZE, ("tokens",), "DetokenizeAnswer"),
    "/health": _get("health", "Whether the gateway is alive", _content(ref("Health")), is_open=True),
    "/ready": _get(
        "ready",
        "Whether the engine takes work",
        _content(ref("Ready")),
        is_open=True,
        others={"503": {"description": "Not now; Retry-After says when to look.", "content": _content(ref("Ready"))}},
    ),
    "/metrics": _get("metrics", "Figures for Prometheus", {"text/plain": {"schema": {"type": "string"}}}),
    "/openapi.json": _get("openapi", "The OpenAPI document", _content({"type": "object"}), is_open=True),
    "/": _page("chatPage", "The chat page"),
    "/dashboard": _page("dashboardPage", "The live view of the engine"),
    "/dashboard/data": _get("dashboardData", "What the dashboard shows", _content({"type": "object"}), (503,)),
    "/page/{name}": _get(
        "pageFile",
        "What the pages load",
        {
            kind: {"schema": {"type": "string"}}
            for kind in ("text/html", "text/css", "text/javascript", "image/svg+xml")
        },
        (404,),
        parameter="name",
        is_open=True,
        others=_UNCHANGED,
    ),
}
