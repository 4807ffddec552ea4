"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's Messages API, as a chat with another form of answer."""

import secrets

from aiohttp import web

from gateway import keys
from gateway.answers import json_bytes
from gateway.errors import anthropic_error_body
from gateway.message_answer import MessageAnswer
from gateway.named_events import NamedEvents
from gateway.routes.adapting import send
from gateway.routes.answering import parse_body
from gateway.schema.anthropic import parse_count, parse_message
from streamkv.errors import InvalidField


async def messages(request: web.Request) -> web.StreamResponse:
    request.app[keys.ADMISSION].check()
    parsed = await parse_body(request, parse_message)
    try:
        prepared = await request.app[keys.GENERATION].prepare(parsed.chat, request[keys.CALLER])
        message_id = "msg_" + (parsed.chat.options.request_id or secrets.token_hex(16))

        def answer(events: NamedEvents | None) -> MessageAnswer:
            return MessageAnswer(message_id, prepared.state.model, events, anthropic_error_body)

        return await send(request, prepared, answer, is_streamed=parsed.chat.options.stream)
    except InvalidField as error:
        raise parsed.names.named(error) from error


async def count_tokens(request: web.Request) -> web.Response:
    """How many tokens a message's prompt has."""
    app = request.app
    parsed = await parse_body(request, parse_count)
    app[keys.GENERATION].check_model(parsed.chat.options.model)
    tokenizer = await app[keys.TOKENIZER].get()
    try:
        token_ids = await tokenizer.encode_chat_off_loop(
            parsed.chat.messages,
            add_generation_prompt=parsed.chat.add_generation_prompt,
            continue_final_message=parsed.chat.continue_final_message,
            template_kwargs=parsed.chat.chat_template_kwargs,
            tools=parsed.chat.tool_use.as_tools(),
        )
    except InvalidField as error:
        raise parsed.names.named(error) from error
    return web.Response(body=json_bytes({"input_tokens": len(token_ids)}), content_type="application/json")
