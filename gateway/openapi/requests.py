"""The fields of every request body. Bounds are the constants that the parsers check; a test compares the two."""

from typing import Final

from gateway.openapi.rules import (
    Schema,
    either,
    flag,
    ignored,
    listed,
    mapping,
    nested,
    number,
    one_of,
    record,
    ref,
    refused,
    text,
    whole,
)
from gateway.response_format import MAX_GRAMMAR_CHOICES, MAX_SCHEMA_NAME_CHARS
from gateway.schema.messages import MAX_MESSAGES
from gateway.schema.options import MAX_ATTACH_GRACE_S, MAX_MAX_TOKENS, MAX_STOP_STRING_CHARS, MAX_STOP_STRINGS
from gateway.schema.reader import MAX_LABEL_CHARS
from gateway.schema.response import MAX_METADATA, MAX_METADATA_CHARS, MAX_METADATA_KEY_CHARS
from gateway.schema.tools import MAX_TOOLS
from streamkv.sampling import (
    MAX_CHOICES,
    MAX_GRAMMAR_CHARS,
    MAX_LOGIT_BIASES,
    MAX_LOGPROBS,
    MAX_SEED,
    MAX_STOP_TOKEN_IDS,
)

_INT32: Final = 2**31
_TOKEN_ID: Final[Schema] = {"type": "integer", "minimum": 0}
_STRING: Final[Schema] = {"type": "string"}
_STOP: Final[Schema] = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_STRING_CHARS}

_MODEL: Final = text("The served model's name; left out, it is whichever is served.", MAX_LABEL_CHARS)
_TEMPLATE_KWARGS: Final = mapping("Variables for the model's chat template, such as `enable_thinking`.")

SAMPLING: Final[dict[str, Schema]] = {
    "temperature": number("0 takes the likeliest token.", 0, 2, 1.0),
    "top_p": number(
        "Keep the smallest set of likeliest tokens whose probability reaches this.", 0, 1, 1.0, is_over=True
    ),
    "top_k": whole("Keep the k likeliest tokens; 0 or -1 keeps all.", -1, _INT32 - 1, 0),
    "min_p": number("Drop tokens less likely than this times the likeliest.", 0, 1, 0.0),
    "seed": whole("The same seed gives the same tokens. Left out: a random one.", 0, MAX_SEED),
    "presence_penalty": number("Taken from the logit of every token that was generated.", -2, 2, 0.0),
    "frequency_penalty": number("Taken from a token's logit once for each time it was generated.", -2, 2, 0.0),
    "repetition_penalty": number(
        "Divides positive logits, and multiplies negative ones, of tokens in the prompt or the answer.",
        0.01,
        10,
        1.0,
    ),
    "logit_bias": mapping(
        "Token id → what is added to its logit.",
        {"type": "number", "minimum": -100, "maximum": 100},
        propertyNames={"pattern": "^[0-9]+$"},
        maxProperties=MAX_LOGIT_BIASES,
    ),
    "stop_token_ids": listed("Token ids that end an answer.", _TOKEN_ID, high=MAX_STOP_TOKEN_IDS),
    "ignore_eos": flag("Go on past the model's end-of-sequence tokens.", False),
    "min_tokens": whole("No end before this many tokens; at most max_tokens.", 0, MAX_MAX_TOKENS, 0),
}
"""How the next token is chosen."""

EXTENSIONS: Final[dict[str, Schema]] = {
    "skip_special_tokens": flag("Leave special tokens out of the text.", True),
    "include_stop_str_in_output": flag("Show the stop string, or the stop token, that ended an answer.", False),
    "cache_salt": text("Prompts share cached blocks only with those of the same salt.", MAX_LABEL_CHARS),
    "priority": whole("Lower goes first, as in vLLM.", -_INT32, _INT32 - 1, 0),
    "request_id": text("A label of the client's own, for the id of the answer and the server's log.", MAX_LABEL_CHARS),
}

STREAM_OPTIONS: Final[dict[str, Schema]] = {
    "include_usage": flag("End with an event that has the usage and no choices.", False),
    "continuous_usage_stats": flag("The usage so far in every event; needs include_usage.", False),
    "include_obfuscation": refused("", False),
}

_STRUCTURE: Final[dict[str, Schema]] = {
    "response_format": either(
        "What the answer's text must look like.",
        record({"type": {"const": "text"}}, ["type"]),
        record({"type": {"const": "json_object"}}, ["type"]),
        record(
            {
                "type": {"const": "json_schema"},
                "json_schema": nested(
                    "The answer follows `schema`, always; `strict` changes nothing.",
                    {
                        "name": text("A label.", MAX_SCHEMA_NAME_CHARS),
                        "description": text("A label.", MAX_GRAMMAR_CHARS),
                        "strict": flag("", False),
                        "schema": mapping("A JSON schema."),
                    },
                    ["schema"],
                ),
            },
            ["type", "json_schema"],
        ),
    ),
    "guided_json": either("A JSON schema, as an object or as text.", {"type": "object"}, _STRING),
    "guided_regex": text("A regular expression that the whole text matches.", MAX_GRAMMAR_CHARS, 1),
    "guided_choice": listed("The text is one of these.", {"type": "string", "minLength": 1}, 1, MAX_GRAMMAR_CHOICES),
    "guided_grammar": text("A grammar in Lark's notation.", MAX_GRAMMAR_CHARS, 1),
    "guided_decoding_backend": ignored("There is one."),
    "guided_whitespace_pattern": refused(""),
    "structured_outputs": nested(
        "One of the kinds above, as newer versions of vLLM name them.",
        {
            "json": either("A JSON schema, as an object or as text.", {"type": "object"}, _STRING),
            "regex": text("", MAX_GRAMMAR_CHARS, 1),
            "choice": listed("", {"type": "string", "minLength": 1}, 1, MAX_GRAMMAR_CHOICES),
            "grammar": text("", MAX_GRAMMAR_CHARS, 1),
            "json_object": flag("", False),
            "disable_fallback": refused("", False),
            "disable_any_whitespace": refused("", False),
            "disable_additional_properties": refused("", False),
            "whitespace_pattern": refused(""),
            "structural_tag": refused(""),
        },
    ),
}

_OPTIONS: Final[dict[str, Schema]] = {
    "model": _MODEL,
    "max_tokens": whole("Most tokens of an answer; left out: what the prompt leaves.", 1, MAX_MAX_TOKENS),
    **SAMPLING,
    "stop": either(
        "Texts that end an answer; not shown and not counted.",
        _STOP,
        {"type": "array", "items": _STOP, "maxItems": MAX_STOP_STRINGS},
    ),
    "n": whole("Answers to each prompt.", 1, MAX_CHOICES, 1),
    "best_of": whole("Generate so many, return the n likeliest; not streamed over n.", 1, MAX_CHOICES),
    "use_beam_search": flag("Search for the likeliest answers instead of drawing tokens; not streamed.", False),
    "beam_width": whole("Beams; left out: best_of, or n.", 1, MAX_CHOICES),
    "length_penalty": number("Beams are compared by log probability over length to this power.", -10, 10, 1.0),
    "early_stopping": refused("", False),
    "stream": flag("Answer by server-sent events.", False),
    "stream_options": nested("Only with stream.", STREAM_OPTIONS),
    "attach_grace_s": number(
        "How long a stream goes on when its client is gone, for somebody to attach to it; only with stream.",
        0,
        MAX_ATTACH_GRACE_S,
        0.0,
    ),
    "prompt_logprobs": whole("Log probabilities of the prompt's tokens, and of so many beside each.", 0, MAX_LOGPROBS),
    "return_tokens_as_token_ids": flag("Log probabilities name tokens `token_id:17`.", False),
    "return_token_ids": flag("Ids of the prompt and of the answer.", False),
    **EXTENSIONS,
    "user": text("A label.", MAX_LABEL_CHARS),
    **_STRUCTURE,
    "bad_words": refused("", []),
    "allowed_token_ids": refused(""),
    "logits_processors": refused("", []),
    "truncate_prompt_tokens": refused(""),
    "store": refused("Answers are not kept.", False),
    "service_tier": refused("", "auto", "default"),
    "metadata": ignored("A label."),
    "prompt_cache_key": ignored("Prompts are found in the cache by their tokens."),
    "prompt_cache_options": ignored("Prompts are always found in the cache, where they are in it."),
    "prompt_cache_retention": ignored("Prompts stay in the cache as long as there is room."),
    "safety_identifier": ignored("A label."),
    "spaces_between_special_tokens": ignored("For tokenizers that this server does not use."),
}
"""What chats and completions share."""

CHAT: Final[dict[str, Schema]] = {
    "messages": {
        "description": "The conversation.",
        "type": "array",
        "items": ref("ChatMessage"),
        "minItems": 1,
        "maxItems": MAX_MESSAGES,
        "x-support": "works",
    },
    "max_completion_tokens": whole("The newer name of max_tokens.", 1, MAX_MAX_TOKENS),
    **_OPTIONS,
    "logprobs": flag("Log probabilities of the answer's tokens.", False),
    "top_logprobs": whole("And of so many likeliest tokens beside each; needs logprobs.", 0, MAX_LOGPROBS),
    "add_generation_prompt": flag("End the prompt where the assistant begins to speak.", True),
    "continue_final_message": flag("Go on with the last message; needs add_generation_prompt to be false.", False),
    "chat_template_kwargs": _TEMPLATE_KWARGS,
    "tools": listed("Functions that the model may call.", ref("ChatTool"), high=MAX_TOOLS),
    "tool_choice": either(
        "Whether it must call one, and which.",
        {"enum": ["none", "auto", "required"]},
        record({"type": {"const": "function"}, "function": record({"name": _STRING}, ["name"])}, ["type", "function"]),
        default="auto",
    ),
    "parallel_tool_calls": flag("Whether an answer may call several functions.", True),
    "include_reasoning": flag("Whether the answer has what the model thought.", True),
    "functions": refused("Send tools.", []),
    "function_call": refused("Send tool_choice.", "none", "auto"),
    "modalities": refused("", ["text"]),
    "audio": refused(""),
    "moderation": refused(""),
    "prediction": refused(""),
    "reasoning_effort": refused("", "none"),
    "reasoning": refused(""),
    "verbosity": refused("", "medium"),
    "web_search_options": refused(""),
    "documents": refused("", []),
    "chat_template": refused("The server's own template is used."),
    "mm_processor_kwargs": refused("", {}),
    "add_special_tokens": refused("The chat template puts the special tokens.", False),
    "echo": refused("", False),
}

COMPLETION: Final[dict[str, Schema]] = {
    "prompt": {
        "description": "A text, or token ids; or a list of either, each of which is answered.",
        "anyOf": [
            _STRING,
            {"type": "array", "items": _TOKEN_ID, "minItems": 1},
            {"type": "array", "items": _STRING, "minItems": 1},
            {"type": "array", "items": {"type": "array", "items": _TOKEN_ID, "minItems": 1}, "minItems": 1},
        ],
        "x-support": "works",
    },
    **_OPTIONS,
    "max_tokens": whole(
        "Most tokens of an answer; left out: what the prompt leaves. 0 only with echo or prompt_logprobs.",
        0,
        MAX_MAX_TOKENS,
    ),
    "logprobs": whole("Log probabilities of the tokens, and of so many beside each.", 0, MAX_LOGPROBS),
    "top_logprobs": refused("Send logprobs.", 0),
    "echo": flag("Give the prompt back before the answer.", False),
    "suffix": refused("", ""),
    "add_special_tokens": flag("Begin with the tokenizer's own special tokens.", True),
}

_EVERYWHERE: Final[dict[str, Schema]] = {
    **SAMPLING,
    **EXTENSIONS,
    "chat_template_kwargs": _TEMPLATE_KWARGS,
}
"""What the adapted APIs have beyond their own fields."""

RESPONSE: Final[dict[str, Schema]] = {
    "input": {
        "description": "A text of the user, or the whole conversation as a list of items.",
        "anyOf": [_STRING, {"type": "array", "items": ref("ResponseItem"), "minItems": 1, "maxItems": MAX_MESSAGES}],
        "x-support": "works",
    },
    "instructions": text("The system message."),
    "model": _MODEL,
    "max_output_tokens": whole("Most tokens of the answer; left out: what the input leaves.", 1, MAX_MAX_TOKENS),
    "stream": flag("Answer by server-sent events.", False),
    "stream_options": nested("Only with stream.", {"include_obfuscation": refused("", False)}),
    "text": nested(
        "",
        {
            "format": either(
                "What the answer's text must look like.",
                record({"type": {"const": "text"}}, ["type"]),
                record({"type": {"const": "json_object"}}, ["type"]),
                record(
                    {
                        "type": {"const": "json_schema"},
                        "name": text("A label.", MAX_SCHEMA_NAME_CHARS),
                        "description": text("A label.", MAX_GRAMMAR_CHARS),
                        "strict": flag("The answer follows the schema anyway.", False),
                        "schema": mapping("A JSON schema."),
                    },
                    ["type", "schema"],
                ),
            ),
            "verbosity": refused("", "medium"),
        },
    ),
    "tools": listed("Functions that the model may call.", ref("ResponseTool"), high=MAX_TOOLS),
    "tool_choice": either(
        "Whether it must call one, and which.",
        {"enum": ["none", "auto", "required"]},
        record({"type": {"const": "function"}, "name": _STRING}, ["type", "name"]),
        default="auto",
    ),
    "parallel_tool_calls": flag("Whether an answer may call several functions.", True),
    "reasoning": nested(
        "",
        {
            "effort": text("As reasoning_effort of a chat."),
            "summary": refused("The reasoning itself is sent.", "auto"),
            "generate_summary": refused("The older name of summary.", "auto"),
        },
    ),
    "include": listed(
        "`message.output_text.logprobs`: log probabilities of the answer's tokens. `reasoning.encrypted_content` is "
        "taken without effect: the reasoning itself is sent.",
        {"enum": ["message.output_text.logprobs", "reasoning.encrypted_content"]},
    ),
    "top_logprobs": whole("So many likeliest tokens beside each; needs the include above.", 0, MAX_LOGPROBS),
    "metadata": mapping(
        "Given back with the answer.",
        {"type": "string", "maxLength": MAX_METADATA_CHARS},
        propertyNames={"maxLength": MAX_METADATA_KEY_CHARS},
        maxProperties=MAX_METADATA,
    ),
    "user": text("A label.", MAX_LABEL_CHARS),
    **_EVERYWHERE,
    "store": refused("Answers are not kept, which is the default here.", False),
    "previous_response_id": refused("Answers are not kept: send the whole input."),
    "conversation": refused("Conversations are not kept: send the whole input."),
    "background": refused("", False),
    "background_options": refused(""),
    "prompt": refused("Prompts are not kept."),
    "truncation": refused("", "disabled"),
    "max_tool_calls": refused("This server runs no tools."),
    "service_tier": refused("", "auto", "default"),
    "context_management": refused(""),
    "moderation": refused(""),
    "image": refused(""),
    "access_programs": refused(""),
    "safety_identifier": ignored("A label."),
    "prompt_cache_key": ignored("Prompts are found in the cache by their tokens."),
    "prompt_cache_retention": ignored("Prompts stay in the cache as long as there is room."),
    "prompt_cache_options": ignored("Prompts are found in the cache by their tokens."),
}

_CONVERSATION: Final[dict[str, Schema]] = {
    "messages": {
        "description": "The conversation.",
        "type": "array",
        "items": ref("AnthropicMessage"),
        "minItems": 1,
        "maxItems": MAX_MESSAGES,
        "x-support": "works",
    },
    "system": either("The system message.", _STRING, {"type": "array", "items": ref("AnthropicText")}),
    "model": _MODEL,
    "tools": listed("Functions that the model may call.", ref("AnthropicTool"), high=MAX_TOOLS),
    "tool_choice": nested(
        "Whether it must call one, and which.",
        {
            "type": {"enum": ["auto", "any", "none", "tool"]},
            "name": text("Of the tool, with the type tool."),
            "disable_parallel_tool_use": flag("At most one call.", False),
        },
        ["type"],
    ),
    "output_config": nested(
        "",
        {
            "format": nested(
                "The answer follows the schema.",
                {"type": {"const": "json_schema"}, "schema": mapping("A JSON schema.")},
                ["type", "schema"],
            ),
            "effort": refused("", "high"),
        },
    ),
    "thinking": nested(
        "Whether the model thinks first, where its template can say so (enable_thinking).",
        {
            "type": one_of("", ["enabled", "adaptive", "disabled"]),
            "budget_tokens": ignored("Thoughts are part of max_tokens."),
            "display": refused("", "summarized"),
        },
    ),
    "cache_control": ignored("Prompts are found in the cache without being marked."),
}
"""What makes the prompt of Anthropic's API."""

MESSAGE: Final[dict[str, Schema]] = {
    **_CONVERSATION,
    "max_tokens": whole("Most tokens of the answer.", 1, MAX_MAX_TOKENS),
    "stop_sequences": listed("Texts that end the answer.", _STOP, high=MAX_STOP_STRINGS),
    "stream": flag("Answer by server-sent events.", False),
    "parallel_tool_calls": flag("Whether an answer may call several functions.", True),
    **_EVERYWHERE,
    "metadata": nested("", {"user_id": text("A label.", MAX_LABEL_CHARS)}),
    "service_tier": refused("", "auto", "standard_only"),
    "mcp_servers": refused("This server runs no tools.", []),
    "container": refused(""),
    "context_management": refused(""),
    "inference_geo": refused(""),
    "diagnostics": refused(""),
    "speed": refused("", "standard"),
}

COUNT: Final[dict[str, Schema]] = {**_CONVERSATION, "chat_template_kwargs": _TEMPLATE_KWARGS}

TOKENIZE: Final[dict[str, Schema]] = {
    "model": _MODEL,
    "prompt": text("A text; or else messages."),
    "messages": listed("A chat; or else a prompt.", ref("ChatMessage"), 1, MAX_MESSAGES),
    "add_special_tokens": flag("Begin with the tokenizer's own special tokens; not for messages.", True),
    "return_token_strs": flag("Each token's text, too.", False),
    "add_generation_prompt": CHAT["add_generation_prompt"],
    "continue_final_message": CHAT["continue_final_message"],
    "chat_template_kwargs": _TEMPLATE_KWARGS,
    "tools": listed("For the chat template.", ref("ChatTool"), high=MAX_TOOLS),
    "chat_template": refused("The server's own template is used."),
}

DETOKENIZE: Final[dict[str, Schema]] = {
    "model": _MODEL,
    "tokens": {"description": "Token ids.", "type": "array", "items": _TOKEN_ID, "x-support": "works"},
}
