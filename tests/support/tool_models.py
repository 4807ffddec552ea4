"""Small tokenizers with the tokens and the kinds of chat template of models that call functions and think."""

import functools
import tempfile
from pathlib import Path

import tokenizers
from tokenizers import AddedToken

from gateway.tokenizer import Tokenizer
from tests.support.small_tokenizers import train_byte_level, write_folder

_CHATML_TOOLS = """\
{%- if tools %}
{{- '<|im_start|>system\\nTools:' }}
{%- for tool in tools %}{{ '\\n' }}{{ tool | tojson }}{% endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
{%- elif message.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' }}
{%- if message.reasoning_content %}{{ '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}{% endif %}
{{- message.content }}
{%- for call in message.tool_calls %}
{{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson + '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- else %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}{% if opens_thoughts %}{{ '<think>\\n' }}{% endif %}
{%- endif %}"""

_LLAMA3_TOOLS = """\
{{- '<|begin_of_text|>' }}
{%- for message in messages %}
{%- if message.role == 'tool' %}<|start_header_id|>ipython<|end_header_id|>

{{ message.content | tojson }}<|eot_id|>
{%- elif 'tool_calls' in message %}
{%- if message.tool_calls | length != 1 %}{{ raise_exception('only one call at once') }}{% endif %}
{%- set call = message.tool_calls[0].function %}<|start_header_id|>assistant<|end_header_id|>

{"name": "{{ call.name }}", "parameters": {{ call.arguments | tojson }}}<|eot_id|>
{%- else %}<|start_header_id|>{{ message.role }}<|end_header_id|>

{% if loop.first and tools %}{% for tool in tools %}{{ tool | tojson(indent=4) }}

{% endfor %}{% endif %}{{ message.content }}<|eot_id|>
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>

{% endif %}"""

_MISTRAL_TOOLS = """\
{{- bos_token }}
{%- for message in messages %}
{%- if message.role == 'user' %}
{%- if tools and loop.last %}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}[INST] {{ message.content }}[/INST]
{%- elif message.tool_calls %}[TOOL_CALLS] [
{%- for call in message.tool_calls %}
{%- if call.id | length != 9 %}{{ raise_exception('the id of a call has 9 characters') }}{% endif %}
{%- set out = call.function | tojson %}{{ out[:-1] }}, "id": "{{ call.id }}"}{% if not loop.last %}, {% endif %}
{%- endfor %}]{{ eos_token }}
{%- elif message.role == 'tool' %}[TOOL_RESULTS] {"content": {{ message.content }}, "call_id": "{{ message.tool_call_id }}"}[/TOOL_RESULTS]
{%- else %} {{ message.content }}{{ eos_token }}
{%- endif %}
{%- endfor %}"""  # noqa: E501  # a template has no line break where a model was not trained on one

_LLAMA3_TOKENS = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|python_tag|>")
_MISTRAL_TOKENS = (
    "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]",
    "[TOOL_CALLS]",
)  # fmt: skip

KINDS = ("hermes", "llama3", "mistral", "mistral-named")


@functools.cache
def _trained() -> str:
    return train_byte_level().to_str()


def tool_model(kind: str) -> Tokenizer:
    """One of KINDS: hermes (its marks and those of thoughts are tokens, but not special), llama3, mistral (special), or
    mistral-named (the form with [ARGS]); or `thinker`: hermes with marks that are special. A new one each time, since a
    gateway closes its own."""
    tokenizer = tokenizers.Tokenizer.from_str(_trained())
    template, eos_token = _CHATML_TOOLS, "<|im_end|>"
    if kind in ("hermes", "thinker"):
        marks = ["<tool_call>", "</tool_call>", "<think>", "</think>"]
        if kind == "thinker":
            tokenizer.add_special_tokens(marks)
        else:
            tokenizer.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in marks])
    elif kind == "llama3":
        tokenizer.add_special_tokens(list(_LLAMA3_TOKENS))
        template, eos_token = _LLAMA3_TOOLS, "<|eot_id|>"
    else:
        named = ["[ARGS]", "[CALL_ID]"] if kind == "mistral-named" else []
        tokenizer.add_special_tokens([*_MISTRAL_TOKENS, *named])
        template, eos_token = _MISTRAL_TOOLS, "</s>"
    with tempfile.TemporaryDirectory() as folder:
        config = {"eos_token": eos_token} | ({"bos_token": "<s>"} if eos_token == "</s>" else {})
        return Tokenizer.load(write_folder(Path(folder) / "model", tokenizer, template, **config))
