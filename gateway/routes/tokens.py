"""POST /tokenize and /detokenize, in vLLM's shapes."""

import asyncio
from typing import Final

from aiohttp import web

from gateway import keys
from gateway.answers import json_bytes
from gateway.routes.answering import parse_body
from gateway.schema.tokens import parse_detokenize, parse_tokenize

_INLINE_TOKENS: Final = 4096


async def tokenize(request: web.Request) -> web.Response:
    """A prompt or a chat → its ids."""
    app = request.app
    parsed = await parse_body(request, parse_tokenize)
    app[keys.GENERATION].check_model(parsed.model)
    tokenizer = await app[keys.TOKENIZER].get()
    if parsed.messages is not None:
        ids = await tokenizer.encode_chat_off_loop(
            parsed.messages,
            add_generation_prompt=parsed.add_generation_prompt,
            continue_final_message=parsed.continue_final_message,
            template_kwargs=parsed.chat_template_kwargs,
            tools=[function.as_tool() for function in parsed.functions],
        )
    else:
        ids = await tokenizer.encode_off_loop(parsed.prompt or "", add_special_tokens=parsed.add_special_tokens)
    ready = app[keys.ENGINE].ready
    body: dict[str, object] = {
        "count": len(ids),
        "max_model_len": ready.model.max_model_len if ready is not None else None,
        "tokens": ids,
        "token_strs": tokenizer.token_texts(ids) if parsed.return_token_strs else None,
    }
    return web.Response(body=json_bytes(body), content_type="application/json")


async def detokenize(request: web.Request) -> web.Response:
    """Ids → their text, special tokens included."""
    app = request.app
    parsed = await parse_body(request, parse_detokenize)
    app[keys.GENERATION].check_model(parsed.model)
    tokenizer = await app[keys.TOKENIZER].get()
    if len(parsed.tokens) <= _INLINE_TOKENS:
        text = tokenizer.decode(parsed.tokens, skip_special_tokens=False)
    else:
        text = await asyncio.to_thread(tokenizer.decode, parsed.tokens, False)
    return web.Response(body=json_bytes({"prompt": text}), content_type="application/json")
