"""POST /v1/responses: OpenAI's Responses API, as a chat with another form of answer."""

import secrets

from aiohttp import web

from gateway import keys
from gateway.errors import error_fields
from gateway.named_events import NamedEvents
from gateway.response_answer import ResponseAnswer, ResponseForm
from gateway.routes.adapting import send
from gateway.routes.answering import parse_body
from gateway.schema.response import parse_response
from streamkv.errors import InvalidField


async def responses(request: web.Request) -> web.StreamResponse:
    request.app[keys.ADMISSION].check()
    parsed = await parse_body(request, parse_response)
    try:
        prepared = await request.app[keys.GENERATION].prepare(parsed.chat, request[keys.CALLER])
        form = ResponseForm(
            response_id="resp_" + (parsed.chat.options.request_id or secrets.token_hex(16)),
            created=prepared.state.created,
            model=prepared.state.model,
            repeated=parsed.repeated,
        )

        def answer(events: NamedEvents | None) -> ResponseAnswer:
            return ResponseAnswer(form, events, error_fields)

        return await send(request, prepared, answer, is_streamed=parsed.chat.options.stream)
    except InvalidField as error:
        raise parsed.names.named(error) from error
