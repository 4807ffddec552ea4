"""The whole API under a fuzzer: no request gets a fault of ours or no answer, and answers are as the document says.

schemathesis makes requests of the OpenAPI document, right ones and wrong ones. Beside it, bodies that are right are
spoilt in one or several places: they touch what a schema does not say, such as fields that need each other.
"""

import copy
import json
from collections.abc import Iterator
from typing import Any, Final

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis.checks import positive_data_acceptance

from gateway.openapi.document import document
from tests.support.gateway_thread import gateway_thread
from tests.support.running_gateway import MODEL, RunningGateway
from tests.support.speaking_executor import SpeakingExecutor
from tests.support.tool_models import tool_model

TIMEOUT_S: Final = 30.0
"""For an answer: a hang, on the slowest machine."""
TEXT: Final = '<think>a sum</think>It is <tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
NOT_HTTP: Final = "/v1/stream"
SCHEMA: Final = schemathesis.openapi.from_dict(json.loads(json.dumps(document())))
_REJECTION: Final = SCHEMA.config.checks.negative_data_rejection
_REJECTION.expected_statuses = [*_REJECTION.expected_statuses, "413"]  # a list that is too long may be so long
OPERATIONS: Final = {
    f"{operation.method} {operation.path}": operation
    for operation in (result.ok() for result in SCHEMA.get_all_operations())
    if operation.path != NOT_HTTP
}
QUIET: Final[dict[str, Any]] = {
    "deadline": None,
    "database": None,
    "suppress_health_check": list(HealthCheck),
    "phases": [Phase.generate],
}


@pytest.fixture(scope="module")
def gateway() -> Iterator[RunningGateway]:
    tokenizer = tool_model("hermes")
    executor = SpeakingExecutor(tokenizer, TEXT, max_model_len=1024)
    with gateway_thread(executor, lambda: tokenizer, request_timeout_s=TIMEOUT_S) as running:
        yield running


def run_operation(url: str, name: str, mode: schemathesis.GenerationMode, num_examples: int) -> None:
    """Requests of one kind to one route, each answer checked against the document."""

    @settings(max_examples=num_examples, **QUIET)
    @given(OPERATIONS[name].as_strategy(generation_mode=mode))
    def run(case: Any) -> None:
        response = case.call(base_url=url, timeout=TIMEOUT_S)
        # Fields that need or exclude each other are not in the schema, so that a right body may be refused
        case.validate_response(response, excluded_checks=[positive_data_acceptance])

    run()


GOOD, BAD = schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE
POSTS: Final = [name for name in OPERATIONS if name.startswith("post") and "embeddings" not in name]


@pytest.mark.parametrize("name", OPERATIONS)
def test_requests_made_of_the_document(gateway: RunningGateway, name: str) -> None:
    run_operation(gateway.url, name, GOOD, 1 if name.startswith("get") else 2)


@pytest.mark.parametrize("name", POSTS)
def test_requests_that_break_the_document_are_refused(gateway: RunningGateway, name: str) -> None:
    run_operation(gateway.url, name, BAD, 2)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("mode", [GOOD, BAD])
@pytest.mark.parametrize("name", POSTS)
def test_many_requests_made_of_the_document(
    gateway: RunningGateway, name: str, mode: schemathesis.GenerationMode
) -> None:
    run_operation(gateway.url, name, mode, 60)


# Right bodies, spoilt

TOOL: Final = {"name": "add", "description": "adds", "parameters": {"type": "object", "properties": {"a": {}}}}
SAMPLING: Final = {"temperature": 0.5, "top_p": 0.9, "top_k": 5, "seed": 7, "stop_token_ids": [3], "min_tokens": 1}
RIGHT: Final[dict[str, list[dict[str, Any]]]] = {
    "/v1/chat/completions": [
        {"model": MODEL, "messages": [{"role": "user", "content": "one"}], "max_tokens": 3, **SAMPLING},
        {
            "messages": [
                {"role": "system", "content": [{"type": "text", "text": "be"}]},
                {"role": "user", "content": "a"},
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [
                        {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a":1}'}}
                    ],
                },
                {"role": "tool", "tool_call_id": "c1", "content": "2"},
            ],
            "tools": [{"type": "function", "function": TOOL}],
            "tool_choice": "auto",
            "max_completion_tokens": 4,
            "logprobs": True,
            "top_logprobs": 2,
            "n": 2,
            "stop": ["x", "yz"],
        },
        {
            "messages": [{"role": "user", "content": "one"}],
            "max_tokens": 3,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            "logit_bias": {"5": 3},
            "presence_penalty": 0.5,
        },
    ],
    "/v1/completions": [
        {"prompt": "one two", "max_tokens": 3, "logprobs": 2, "echo": True, **SAMPLING},
        {"prompt": [[4, 5], [6, 7]], "max_tokens": 3, "n": 2, "best_of": 3, "return_token_ids": True},
        {"prompt": ["a", "b"], "max_tokens": 2, "stream": True, "prompt_logprobs": 1},
    ],
    "/v1/responses": [
        {"input": "one", "max_output_tokens": 3, "instructions": "be", "metadata": {"a": "b"}, "seed": 1},
        {
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "one"}]},
                {
                    "type": "reasoning",
                    "id": "rs_1",
                    "summary": [],
                    "content": [{"type": "reasoning_text", "text": "x"}],
                },
                {"type": "function_call", "call_id": "c1", "name": "add", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c1", "output": "2"},
            ],
            "tools": [{"type": "function", **TOOL, "strict": True}],
            "tool_choice": {"type": "function", "name": "add"},
            "max_output_tokens": 3,
            "stream": True,
            "include": ["message.output_text.logprobs"],
            "top_logprobs": 1,
        },
    ],
    "/v1/messages": [
        {"messages": [{"role": "user", "content": "one"}], "max_tokens": 3, "stop_sequences": ["q"], "top_k": 3},
        {
            "system": [{"type": "text", "text": "be", "cache_control": {"type": "ephemeral"}}],
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "one"}]},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "x", "signature": ""},
                        {"type": "tool_use", "id": "c1", "name": "add", "input": {"a": 1}},
                    ],
                },
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "2"}]},
            ],
            "tools": [{"name": "add", "description": "adds", "input_schema": {"type": "object", "properties": {}}}],
            "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
            "max_tokens": 3,
            "stream": True,
        },
    ],
    "/v1/messages/count_tokens": [{"messages": [{"role": "user", "content": "one"}], "system": "be"}],
    "/tokenize": [{"prompt": "one"}, {"messages": [{"role": "user", "content": "one"}], "return_token_strs": True}],
    "/detokenize": [{"tokens": [3, 4]}],
}
ODD: Final = st.sampled_from(
    [None, True, False, 0, 1, -1, 0.5, -0.0, 1e308, 2**31, 2**63, 2**64, -(2**63), 10**30, "", "x", "\x00", "😀" * 40,
     "a\u0301", [], {}, [None], [[]], [{}], {"": None}, {"type": "x"}, {"type": "text", "text": "y"}, ["a", 1], [1.5]]
)  # fmt: skip


def places(value: Any, path: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    """Every place inside a body."""
    inside: list[tuple[str | int, ...]] = []
    keys = value.keys() if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        inside += [(*path, key), *places(value[key], (*path, key))]
    return inside


@st.composite
def spoilt(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    """A path and a right body of it with one to three places changed, left out, added or moved to another body's."""
    path = draw(st.sampled_from(sorted(RIGHT)))
    body = copy.deepcopy(draw(st.sampled_from(RIGHT[path])))
    for _ in range(draw(st.integers(1, 3))):
        all_places = places(body)
        if not all_places:
            break
        place = draw(st.sampled_from(all_places))
        holder: Any = body
        for step in place[:-1]:
            holder = holder[step]
        match draw(st.sampled_from(["change", "leave out", "add", "move"])):
            case "change":
                holder[place[-1]] = copy.deepcopy(draw(ODD))
            case "leave out":
                del holder[place[-1]]
            case "add" if isinstance(holder, dict):
                holder[draw(st.sampled_from(["extra", "n", "stream", "type", "role", "name", "content"]))] = (
                    copy.deepcopy(draw(ODD))
                )
            case _:
                other = copy.deepcopy(draw(st.sampled_from(RIGHT[draw(st.sampled_from(sorted(RIGHT)))])))
                key = draw(st.sampled_from(sorted(other)))
                body[key] = other[key]
    return path, body


def check_spoilt(url: str, path: str, body: dict[str, Any]) -> None:
    response = requests.post(url + path, json=body, timeout=TIMEOUT_S)
    if response.status_code == 200:
        if response.headers["Content-Type"].startswith("text/event-stream"):
            check_events(path, response.text)
        else:
            response.json()
        return
    error = response.json()["error"]
    assert response.status_code == 400 or (response.status_code == 404 and "model" in body), error
    if path.startswith("/v1/messages"):
        assert response.json()["type"] == "error"
        name = error["message"].partition(":")[0]
    else:
        assert set(error) == {"message", "type", "param", "code"}
        assert error["message"].startswith(error["param"]) or error["code"] == "model_not_found"
        name = error["param"]
    root = name.partition(".")[0].partition("[")[0]
    required = {"messages", "prompt", "input", "max_tokens", "tokens", "model", "body"}
    assert root[:57] in {key[:57] for key in body} | required, f"{name}: not a field of {body}"


def check_events(path: str, text: str) -> None:
    """It ends once, and as its API has it."""
    ends = {
        "/v1/responses": ("response.completed", "response.incomplete", "response.failed"),
        "/v1/messages": ("message_stop", "error"),
    }
    if path in ends:
        names = [line.removeprefix("event: ") for line in text.splitlines() if line.startswith("event: ")]
        assert names[-1] in ends[path] and sum(name in ends[path] for name in names) == 1
    else:
        assert text.endswith("data: [DONE]\n\n") and text.count("data: [DONE]") == 1


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(request_=spoilt())
def test_a_spoilt_body_is_answered_or_a_field_of_it_is_named(
    gateway: RunningGateway, request_: tuple[str, dict[str, Any]]
) -> None:
    check_spoilt(gateway.url, *request_)


@pytest.mark.long
@pytest.mark.timeout(900)
@settings(max_examples=2000, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(request_=spoilt())
def test_many_spoilt_bodies_are_answered_or_a_field_of_them_is_named(
    gateway: RunningGateway, request_: tuple[str, dict[str, Any]]
) -> None:
    check_spoilt(gateway.url, *request_)


@pytest.mark.parametrize(("path", "number"), [(path, n) for path in RIGHT for n in range(len(RIGHT[path]))])
def test_a_right_body_is_answered(gateway: RunningGateway, path: str, number: int) -> None:
    response = requests.post(gateway.url + path, json=RIGHT[path][number], timeout=TIMEOUT_S)
    assert response.status_code == 200, response.text
