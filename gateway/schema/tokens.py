"""/tokenize and /detokenize."""

import msgspec

from gateway.chat_template import ChatMessage
from gateway.schema.body import decode_object
from gateway.schema.messages import check_continuation, read_messages
from gateway.schema.options import RequestLimits
from gateway.schema.reader import MAX_LABEL_CHARS, FieldReader
from gateway.schema.tools import Function, read_tools
from streamkv.errors import InvalidField


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """POST /tokenize: exactly one of prompt and messages."""

    model: str = ""
    prompt: str | None = None
    messages: tuple[ChatMessage, ...] | None = None
    add_special_tokens: bool = True
    return_token_strs: bool = False
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, object] = {}
    functions: tuple[Function, ...] = ()


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """POST /detokenize."""

    model: str = ""
    tokens: list[int]


def parse_tokenize(body: bytes, limits: RequestLimits) -> TokenizeRequest:
    """POST /tokenize. Raises InvalidField."""
    reader = FieldReader(decode_object(body))
    model = reader.text("model", MAX_LABEL_CHARS)
    prompt = reader.text_or_none("prompt")
    messages = read_messages(reader) if "messages" in reader else None
    if messages is None:
        reader.take("messages")  # null
    if (prompt is None) == (messages is None):
        raise InvalidField("prompt", "send exactly one of prompt and messages")
    request = TokenizeRequest(
        model=model,
        prompt=prompt,
        messages=messages,
        add_special_tokens=reader.boolean("add_special_tokens", default=messages is None),
        return_token_strs=reader.boolean("return_token_strs", default=False),
        add_generation_prompt=reader.boolean("add_generation_prompt", default=True),
        continue_final_message=reader.boolean("continue_final_message", default=False),
        chat_template_kwargs=reader.mapping("chat_template_kwargs"),
        functions=read_tools(reader),
    )
    if messages is not None and request.add_special_tokens:
        raise InvalidField(
            "add_special_tokens", "cannot be true for messages: the chat template puts the special tokens"
        )
    if messages is None and request.functions:
        raise InvalidField("tools", "needs messages: a chat template writes them")
    check_continuation(request.add_generation_prompt, request.continue_final_message)
    reader.neutral("chat_template", instead="the server's own template is used")
    reader.finish()
    return request


def parse_detokenize(body: bytes, limits: RequestLimits) -> DetokenizeRequest:
    """POST /detokenize. Raises InvalidField."""
    reader = FieldReader(decode_object(body))
    if "tokens" not in reader:
        raise InvalidField("tokens", "is missing; send a list of token ids")
    request = DetokenizeRequest(
        model=reader.text("model", MAX_LABEL_CHARS), tokens=reader.token_ids("tokens", limits.vocab_size)
    )
    reader.finish()
    return request
