"""Writes docs/api.md, its tables from the OpenAPI document: python -m docs.api"""

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from gateway.openapi.document import document
from gateway.openapi.rules import SUPPORT

HEAD = """\
# The API

Written by `python -m docs.api`; its tables come from the OpenAPI document that the server itself gives out at
`/openapi.json`, and tests compare that with what the server takes. The WebSocket has a page of its own,
[websocket.md](websocket.md); keys, limits and logs are in [operations.md](operations.md).

```sh
streamkv serve --port 8000 &
curl http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' \\
     -d '{"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 50}'
```

Existing clients work when they are given the address: OpenAI's with the base URL `http://127.0.0.1:8000/v1`,
Anthropic's with `http://127.0.0.1:8000`. When the server has no API keys, any key will do.

```python
from openai import OpenAI

client = OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none")
for chunk in client.chat.completions.create(
    model="SmolLM2-135M-Instruct", messages=[{"role": "user", "content": "Hello"}], stream=True
):
    print(chunk.choices[0].delta.content or "", end="", flush=True)
```
"""

RULES = """\
## What holds everywhere

- **A key** is sent as `Authorization: Bearer KEY` or as `x-api-key: KEY`, where the server has keys. Without one only
  the pages, `/health`, `/ready` and `/openapi.json` answer.
- **A body** is JSON in UTF-8, packed by gzip or deflate if `Content-Encoding` says so, and at most `--max-body-bytes`
  long. A key twice in one object, `NaN`, half a surrogate pair, and nesting beyond 32 levels are refused.
- **A field** works, has no effect here, or is refused by a 400 that names it. Null is the same as leaving it out. A
  field that is not in the tables is refused, with a hint where the name is nearly that of another.
- **`model`** may be left out. Another name than that of the served model is 404.
- **Streamed or not**, the outcome is the same: text, reasons, counts, errors.
- **An error before the first event** is a status; one after it is the stream's last event.
- `HEAD` works where `GET` does, and `OPTIONS` answers 204 with `Allow`. A request id that comes in `X-Request-Id` goes
  out again.

An error's body is OpenAI's:

```json
{"error": {"message": "temperature: must be between 0 and 2, got 3.0", "type": "invalid_request_error",
           "param": "temperature", "code": "invalid_value"}}
```

Below `/v1/messages` it is Anthropic's, with the field at the beginning of the message:
`{"type": "error", "error": {"type": "invalid_request_error", "message": "max_tokens: …"}}`.
"""

CHAT = """\
## Chats

`POST /v1/chat/completions`, as OpenAI has it. A message has a `role` (`system`, the same as `developer`; `user`,
`assistant`, `tool`) and a `content`: a text, or a list of `{"type": "text", "text": …}`, which are joined by line
breaks. Images, audio and files are refused. Text in a message never becomes a special token of the model, whatever is
written.

```sh
curl -N http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' \\
     -d '{"messages": [{"role": "user", "content": "Hello"}], "stream": true,
          "stream_options": {"include_usage": true}}'
```

A stream's first chunk of each choice has the role, the last its `finish_reason`; with `include_usage` a chunk without
choices follows, which has the usage; then `data: [DONE]`.

`finish_reason` is `stop` (the model's end, a stop string or a stop token; `stop_reason` says which string or id),
`length` (`max_tokens`, or the model's length), `tool_calls`, or, where the answer was cut off from outside, `abort`
(timeout, cancelled, server shut down) and `error`.
"""

PARTS = """\
### Structured output

`response_format` makes the text JSON (`json_object`), or JSON that follows a schema (`json_schema`, always strictly).
`guided_json`, `guided_regex`, `guided_choice` and `guided_grammar` (Lark's notation), or `structured_outputs` with the
same kinds, are vLLM's names for the same and more; a request takes one of them. The model can only write what fits: it
ends where the text is complete, and text that is cut off by `max_tokens` (`length`) is a beginning of what fits. A
schema or grammar that cannot be compiled, or is too large, is refused.

```sh
curl http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' -d '{
  "messages": [{"role": "user", "content": "Paris: name and population"}],
  "response_format": {"type": "json_schema", "json_schema": {"name": "city", "schema": {"type": "object",
    "properties": {"name": {"type": "string"}, "population": {"type": "integer"}},
    "required": ["name", "population"], "additionalProperties": false}}}}'
```

### Functions

`tools` are given to the model by its own chat template; models without tools in their template are refused them. Calls
are told apart from text for the forms of Hermes and Qwen, Llama 3 and Mistral, which the server finds out from the
template (`--tool-call-parser` sets it). They come as `tool_calls`, with `finish_reason` `tool_calls`; in a stream the
arguments come in pieces, as the model writes them. A call that is cut off by `max_tokens` ends with `length`.

`tool_choice` `auto` leaves it to the model, whose arguments are then its own; `required`, or a named function, makes it
call, with arguments that follow the schema. `parallel_tool_calls: false` keeps an answer to one call. The result goes
back as a message with the role `tool` and the call's id in `tool_call_id`, behind the assistant's message with its
`tool_calls`.

### Reasoning

What a model thinks between `<think>` and `</think>` before it answers comes as `reasoning` and, with the same text, as
`reasoning_content` of the message or delta, and not in `content` (`--reasoning-parser` sets it).
`include_reasoning: false` leaves it out. It counts as output tokens. Sent back with an assistant's message, it is used
where the model's template does so. Whether a model thinks is up to its template, as with
`"chat_template_kwargs": {"enable_thinking": false}` for Qwen 3.

### Log probabilities

Chats: `logprobs: true`, and `top_logprobs` for the likeliest others. Completions: `logprobs: N`. Both:
`prompt_logprobs: N`, in vLLM's form. They are the model's own, before temperature, penalties, biases and filters. They
are not given in beam search.
"""

COMPLETIONS = """\
## Completions

`POST /v1/completions` continues a text, or a list of token ids. A list of texts, or of lists of ids, is several
prompts: their choices are numbered on, first those of the first prompt. A special token that is written in a prompt is
that token.

```sh
curl http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' \\
     -d '{"prompt": "Once upon a time", "max_tokens": 20, "temperature": 0}'
```

With `echo` the text begins with the prompt; with `max_tokens: 0` beside it, it is all there is, which with `logprobs`
scores a text. `best_of` over `n`, and beam search, rank their choices by mean log probability, and so are not streamed.
"""

STREAMS = """\
## Streams

Events are server-sent events. A comment goes out after `--keepalive-s` of silence, also before the first token, so that
no proxy takes the connection for dead (Anthropic's clients get a `ping`). A client that goes away ends its answer, if
it did not ask for a grace period.

Every event of a chat or of a completion of one prompt has an `id`. A client that sent `attach_grace_s` (or the header
`X-Attach-Grace`) and lost its connection gets the rest by repeating the request with the header `Last-Event-ID`, or by
`GET /v1/streams/{stream_id}` with it; `X-Stream-Id` of the first answer is the stream's id. It gets exactly the events
that it has not seen, then the live ones. `DELETE /v1/streams/{stream_id}` ends a stream, and
nothing of it is kept.

```sh
curl -N http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' \\
     -d '{"messages": [{"role": "user", "content": "Tell me a story"}], "stream": true, "attach_grace_s": 60}'
curl -N http://127.0.0.1:8000/v1/streams/STREAM_ID -H 'Last-Event-ID: ID_OF_THE_LAST_EVENT'
```
"""

RESPONSES = """\
## OpenAI's Responses API

`POST /v1/responses` is the same chat in another form. `instructions` is the system message; `input` is a text or a list
of items: messages, `function_call`, `function_call_output`, `reasoning`. An earlier answer's `output` can be put in
front of the next turn as it is. Nothing is stored: `store` is false, and a turn that builds on `previous_response_id`
is refused.

```sh
curl -N http://127.0.0.1:8000/v1/responses -H 'Content-Type: application/json' \\
     -d '{"input": "Hello", "instructions": "Be brief.", "max_output_tokens": 50, "stream": true}'
```

The output has a `reasoning` item where the model thought (as `reasoning_text`, never a summary), a `message`, and a
`function_call` for each call. An answer that was cut off by length has the status `incomplete`, one that was broken off
`failed` with the text so far. A stream ends with `response.completed`, `response.incomplete` or `response.failed`.
"""

MESSAGES = """\
## Anthropic's Messages API

`POST /v1/messages` is the same chat in Anthropic's form: `system`, blocks of `text`, `thinking`, `tool_use` and
`tool_result`, `max_tokens` that must be there. `anthropic-version` may be sent and is not looked at.

```sh
curl -N http://127.0.0.1:8000/v1/messages -H 'Content-Type: application/json' \\
     -d '{"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 50, "stream": true}'
```

`stop_reason` is `end_turn`, `max_tokens`, `stop_sequence` (with the string in `stop_sequence`) or `tool_use`. An answer
that was broken off (timeout, shutdown) has none in Anthropic's API and ends with an error. Tokens that were found in
the cache are in `cache_read_input_tokens`, and not in `input_tokens`; in a stream they are known at its end.
`POST /v1/messages/count_tokens` counts the tokens of a prompt.
"""

OTHERS = """\
## The others

```sh
curl http://127.0.0.1:8000/v1/models
curl http://127.0.0.1:8000/tokenize -H 'Content-Type: application/json' -d '{"prompt": "Hello"}'
curl http://127.0.0.1:8000/detokenize -H 'Content-Type: application/json' -d '{"tokens": [19556]}'
curl http://127.0.0.1:8000/ready
```

`/v1/models` is a list of one, which both OpenAI's and Anthropic's clients read; `max_model_len` is the most tokens that
a prompt and its answer may have together. `/tokenize` takes a `prompt` or `messages`. `/v1/embeddings` is refused: the
server generates text. `/health` says whether the gateway lives, `/ready` whether the engine takes work, with the stage
and percent of its start while it does not.
"""

LIMITS = """\
## Limits

Where a key has budgets, every answer has `x-ratelimit-limit-requests`, `x-ratelimit-remaining-requests`,
`x-ratelimit-reset-requests` and the same for `tokens`. Beyond a budget the answer is 429, and when the server is full
503; both have `Retry-After`. [operations.md](operations.md#keys-and-limits) has the rest.
"""

DIFFERENCES = """\
## Differences from OpenAI

- `model` may be left out; `max_tokens` left out means what the prompt leaves, in completions too.
- `store`, `previous_response_id`, `background`, `conversation`, `service_tier` and built-in tools are refused.
- `reasoning_effort` and `verbosity` are refused but for values that change nothing: the model decides.
- `temperature` is 0 to 2 and `top_p` over 0 in every API, Anthropic's too. `n` is 1 to 128, `stop` up to 16 strings,
  `top_logprobs` 0 to 20.
- A seed gives the same tokens each time, alone or in a batch, before and after a restart.
- `strict` is accepted and changes nothing: a schema is always followed, a function's where the call was asked for.
- Choices have a `stop_reason`; usage has `prompt_tokens_details.cached_tokens`.
- More fields than OpenAI has: the sampling fields of vLLM, `cache_salt`, `priority`, `attach_grace_s`,
  `return_token_ids` and others in the tables.
"""


def page() -> str:
    """The page's text."""
    described: Mapping[str, Any] = document()
    paths = described["paths"]
    fields = {path: _fields(operations["post"]) for path, operations in paths.items() if "post" in operations}
    chat, completion = fields["/v1/chat/completions"], fields["/v1/completions"]
    shared = {name: schema for name, schema in chat.items() if completion.get(name) == schema}
    every = {
        name: schema
        for name, schema in shared.items()
        if fields["/v1/responses"].get(name) == schema and fields["/v1/messages"].get(name) == schema
    }
    return "\n".join(
        [
            HEAD,
            "## The endpoints\n",
            *_endpoints(paths),
            RULES,
            *_statuses(paths["/v1/chat/completions"]["post"]),
            CHAT,
            "Fields of chats alone:\n",
            *_tables(_without(chat, shared)),
            "Fields that chats and completions share:\n",
            *_tables(_without(shared, every)),
            "Fields of every API that generates, Responses and Messages too:\n",
            *_tables(every),
            PARTS,
            COMPLETIONS,
            *_tables(_without(completion, shared)),
            STREAMS,
            RESPONSES,
            *_tables(_without(fields["/v1/responses"], every)),
            MESSAGES,
            *_tables(_without(fields["/v1/messages"], every)),
            OTHERS,
            *_tables(fields["/tokenize"]),
            LIMITS,
            DIFFERENCES,
        ]
    )


def _fields(operation: Mapping[str, Any]) -> dict[str, Any]:
    schema = operation["requestBody"]["content"]["application/json"]["schema"]
    properties: dict[str, Any] = schema.get("properties", {})
    return properties


def _without(fields: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    return {name: schema for name, schema in fields.items() if name not in others}


def _endpoints(paths: Mapping[str, Any]) -> list[str]:
    rows = [
        f"| `{method.upper()} {path}` | {operation['summary']} |"
        for path, operations in paths.items()
        for method, operation in operations.items()
    ]
    return ["| endpoint | what it does |", "| --- | --- |", *rows, ""]


def _statuses(operation: Mapping[str, Any]) -> list[str]:
    rows = [
        f"| {status} | {answer['description']} |"
        for status, answer in sorted(operation["responses"].items())
        if status >= "400"
    ]
    return ["| status | when |", "| --- | --- |", *rows, ""]


def _tables(fields: Mapping[str, Any]) -> list[str]:
    """A table of the fields that work, then one of those that do not."""
    working = {name: schema for name, schema in fields.items() if schema.get(SUPPORT) == "works"}
    rest = _without(fields, working)
    lines = _table(("field", "what it takes", "default", "what it does"), working, _working_row)
    return lines + _table(("field", "", "taken only as", "why"), rest, _other_row)


def _table(
    heads: Iterable[str], fields: Mapping[str, Any], row: Callable[[str, Mapping[str, Any]], tuple[str, ...]]
) -> list[str]:
    if not fields:
        return []
    lines = [tuple(heads), ("---", "---", "---", "---"), *(row(name, schema) for name, schema in fields.items())]
    return ["| " + " | ".join(cells) + " |" for cells in lines] + [""]


def _working_row(name: str, schema: Mapping[str, Any]) -> tuple[str, ...]:
    default = f"`{json.dumps(schema['default'])}`" if "default" in schema else ""
    return f"`{name}`", _taken(schema), default, schema["description"]


def _other_row(name: str, schema: Mapping[str, Any]) -> tuple[str, ...]:
    support = schema[SUPPORT]
    if support == "ignored":
        return f"`{name}`", "ignored", "anything", schema["description"].removeprefix("Taken without effect.").strip()
    values = [value for value in schema.get("enum", ()) if value is not None]
    accepted = ", ".join(f"`{json.dumps(value)}`" for value in values) or "null"
    return f"`{name}`", "refused", accepted, schema["description"].removeprefix("Not supported.").strip()


def _taken(schema: Mapping[str, Any]) -> str:
    """A schema in words."""
    if "$ref" in schema:
        return "an object"
    if "anyOf" in schema:
        kinds = [_taken(each) for each in schema["anyOf"] if each != {"type": "null"}]
        return ", or ".join(dict.fromkeys(kinds))
    if "const" in schema:
        return f"`{json.dumps(schema['const'])}`"
    if "enum" in schema:
        return ", ".join(f"`{json.dumps(value)}`" for value in schema["enum"] if value is not None)
    kinds = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    match next(kind for kind in kinds if kind != "null"):
        case "boolean":
            return "true or false"
        case "integer":
            return "a whole number" + _range(schema)
        case "number":
            return "a number" + _range(schema)
        case "string":
            return "a text" + (f", up to {schema['maxLength']} characters" if "maxLength" in schema else "")
        case "array":
            most = f", up to {schema['maxItems']}" if "maxItems" in schema else ""
            return f"a list{most}, each {_taken(schema['items'])}"
        case _:
            return "an object" + _keys(schema)


def _range(schema: Mapping[str, Any]) -> str:
    low, high = schema.get("minimum"), schema.get("maximum")
    if low is None and "exclusiveMinimum" in schema:
        return f" over {schema['exclusiveMinimum']}, at most {high}"
    if low is None or high is None:
        return "" if low is None else f" from {low} on"
    return f", {_short(low)} to {_short(high)}"


def _short(number: float) -> str:
    powers = {2**31 - 1: "2³¹ − 1", -(2**31): "−2³¹", 2**64 - 1: "2⁶⁴ − 1"}
    return powers[int(number)] if number in powers else f"{number:g}"


def _keys(schema: Mapping[str, Any]) -> str:
    names = [
        f"`{name}`" for name, each in schema.get("properties", {}).items() if each.get(SUPPORT, "works") == "works"
    ]
    return f" with {', '.join(names)}" if names else ""


if __name__ == "__main__":
    Path(__file__).with_suffix(".md").write_text(page(), encoding="utf-8")
