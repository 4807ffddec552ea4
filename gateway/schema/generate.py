"""A `generate` of a WebSocket."""

from gateway.schema.chat import ChatRequest, chat_from_fields
from gateway.schema.completion import CompletionRequest, completion_from_fields
from gateway.schema.options import RequestLimits
from streamkv.errors import InvalidField


def generate_from_fields(fields: dict[str, object], limits: RequestLimits) -> ChatRequest | CompletionRequest:
    """A WebSocket `generate` without its type and id: a chat when it has messages, else a completion. Always a
    stream. Raises InvalidField."""
    if fields.get("messages") is not None and fields.get("prompt") is not None:
        raise InvalidField("prompt", "send either prompt or messages")
    if fields.get("stream") is False:
        raise InvalidField("stream", "cannot be false on a WebSocket")
    streamed: dict[str, object] = {**fields, "stream": True}
    if fields.get("messages") is not None:
        streamed.pop("prompt", None)
        return chat_from_fields(streamed, limits)
    streamed.pop("messages", None)
    request = completion_from_fields(streamed, limits)
    if len(request.prompts) > 1:
        raise InvalidField("prompt", f"takes one prompt on a WebSocket, got {len(request.prompts)}; generate each")
    return request
