"""Writes docs/configuration.md from the settings' declarations: python -m docs.configuration"""

from pathlib import Path

from streamkv.config import EngineConfig, GatewayConfig
from streamkv.settings import Kind, Setting, by_group, settings

HEAD = """\
# Settings

Written by `python -m docs.configuration` from `streamkv/config.py`; a test keeps it current.

Every setting has three names. For the block size they are: the flag `--block-size 32`, the variable
`STREAMKV_BLOCK_SIZE=32`, and the key `block_size = 32` in a TOML file that `--config FILE` or `STREAMKV_CONFIG` names.
A flag wins over a variable, a variable over the file, the file over the default. An empty variable counts as not set.
A boolean is switched by `--name` and `--no-name`.

`streamkv serve` takes the settings of both processes; `streamkv engine` and `streamkv gateway` take their own. In the
file, keys at the top hold for both processes, keys in a table for one:

```toml
model = "default"

[engine]
block_size = 32
kv_cache_memory_gib = 2.0

[gateway]
port = 9000
```

Three variables are no settings: `STREAMKV_CACHE` is the folder for downloaded models (default `~/.cache/streamkv`),
`STREAMKV_API_KEY` is an API key: the one that the gateway lets in, and the one that `streamkv chat` and
`streamkv bench` send; `STREAMKV_API_KEYS` has more that the gateway lets in. They are no flags, since command lines can
be read by everybody on a machine. What the server tells of itself, and how to watch it, is in
[operations.md](operations.md).

## API keys

Without keys the gateway lets everybody in. One key is set by `STREAMKV_API_KEY` (its name is `default`), several by
`STREAMKV_API_KEYS="alice=2f6c… bob=77ab…"`, and more stand in a TOML file that `--api-keys-file` names; all may be used
together. A key must have 16 to 256 visible ASCII characters; `openssl rand -hex 32` makes a good one. A line of the
file is a name and its key; a table can say more, and what it leaves out is as the settings say:

```toml
alice = "2f6c…"

[keys.batch]                   # or just [batch]
key = "91d0…"
shares_prefix = true
requests_per_minute = 60       # 0: no limit, whatever the setting is
tokens_per_minute = 200_000    # of prompts and answers together
max_concurrent = 8
```

The file is looked at every two seconds and read again when it has changed, in place or by a new file under its name.
Keys that are gone from it are refused from then on, while streams that they began go on to their end. A file that is
wrong, or gone, changes nothing: the keys stay as they were, and the log says why. One that others can change counts as
wrong, one that others can read is taken with a warning in the log: `chmod 600` it. At the start a wrong file is an
error. Keys are kept as hashes, compared in constant time, and never logged; the name of a key is logged with its
requests. Anything but `/health`, `/ready` and the pages needs a key, `/metrics` and paths that do not exist included:
`Authorization: Bearer KEY` or `x-api-key: KEY`, or else the answer is 401. Keys travel as they are, so put a proxy with
TLS in front before you open the port to others.

The name, not the key, is whose share of the engine a request uses: a key can be replaced without losing anything, and
two gateways of one engine must not give one name to different people. Cached prompts are found again within one name
and one `cache_salt` only, so that nobody can find out by the time of an answer what others have asked. With
`shares_prefix = true`, or with `--share-prefix-cache` for all keys that do not say otherwise, a key's prompts are
shared with the others that share, and still count as its own. A stream can be attached to by its own name alone.

## Limits

Each key has budgets of requests and tokens per minute and a number of requests at once, by its table in the file or by
`--requests-per-minute`, `--tokens-per-minute` and `--max-concurrent`; 0, the default, is no limit. Without keys the
settings are one budget for everybody together.

A budget is a bucket that holds one minute's worth and fills evenly. A request is let in while there is at least one
request and one token in the buckets, and takes one request at once, whatever it is answered; the tokens of its prompt
are charged when it goes to the engine, those of its answer once a second and at its end. Nothing is reserved for
`max_tokens`: what a request takes beyond the bucket is a debt that fills up before the next one is let in. Prompt
tokens that were found in the cache count like others. A request that the engine has no room for costs no tokens. A
place among those at once is held until the last token, also while a stream goes on without its client.

What is over a limit is answered 429 with OpenAI's error (`code` is `rate_limit_exceeded`, `type` the limit: `requests`,
`tokens` or `concurrency`) and a `Retry-After` after which the bucket holds enough; with all places taken it is one
second, since nobody knows when the caller's own requests end. On a WebSocket it is an `error` event with
`retry_after_s`. Every answer to a limited caller has `x-ratelimit-limit-requests`, `-remaining-requests` and
`-reset-requests` (time until the bucket is full), and the same for tokens; those of a stream tell what was left when it
began. A server that is full, whoever filled it, answers 503 with a `Retry-After` instead.

Counted are `POST` requests to `/v1/chat/completions`, `/v1/completions`, `/v1/responses`, `/v1/messages`,
`/v1/messages/count_tokens`, `/tokenize` and `/detokenize`, and each `generate` of a WebSocket. Several prompts in one
request are one request. Attaching to a stream is none, and is never refused by a limit.

## Web pages

A browser lets a page of any site open a WebSocket to any server, also to one on the user's own machine. So the
gateway compares the handshake's `Origin`, which browsers send and other clients do not, with the `Host` that it was
asked for, and answers 403 when they differ. `--allowed-origins` names other sites whose pages may connect; behind a
proxy that changes `Host`, name the public address there or have the proxy pass `Host` on.

The same origins may use the HTTP API from a page (CORS): their preflight requests are answered without a key, they may
send whatever headers their client library adds, and read `x-request-id`, `x-ratelimit-*` and `retry-after` of the
answers. Cookies play no part.
"""


def page() -> str:
    """The page's text."""
    return "\n".join([HEAD, *_section("Engine", EngineConfig), *_section("Gateway", GatewayConfig)])


def _section(title: str, kind: Kind) -> list[str]:
    lines = [f"## {title}", ""]
    for group, members in by_group(settings(kind).values()).items():
        lines += [f"### {group}", "", "| flag | default | allowed | what it is |", "| --- | --- | --- | --- |"]
        lines += [_row(setting) for setting in members]
        lines.append("")
    return lines


def _row(setting: Setting) -> str:
    flag = f"`{setting.flag}`" + (f", `{setting.off_flag}`" if setting.kind is bool else "")
    default = str(setting.default).lower() if setting.kind is bool else str(setting.default)
    return f"| {flag} | {f'`{default}`' if default else 'empty'} | {setting.allowed} | {setting.rule.text} |"


if __name__ == "__main__":
    Path(__file__).with_suffix(".md").write_text(page(), encoding="utf-8")
