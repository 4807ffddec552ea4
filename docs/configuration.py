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

Two variables are no settings: `STREAMKV_CACHE` is the folder for downloaded models (default `~/.cache/streamkv`), and
`STREAMKV_API_KEY` is an API key: the one that the gateway lets in, and the one that `streamkv chat` and
`streamkv bench` send. It is no flag, since command lines can be read by everybody on a machine.

## API keys

Without keys the gateway lets everybody in. One key is set by `STREAMKV_API_KEY`; more of them stand in a TOML file
that `--api-keys-file` names, and both may be used together (the variable's key has the name `default`). A key must have
16 to 256 visible ASCII characters; `openssl rand -hex 32` makes a good one. A line of the file is a name and its key; a
table can say more:

```toml
alice = "2f6c…"

[batch]
key = "91d0…"
shares_prefix = true
```

The file is read at the start. One that others can change is refused, one that others can read is taken with a warning
in the log: `chmod 600` it. Keys are kept as hashes, compared in constant time, and never logged; the name of a key is
logged with its requests. Anything but `/health` and `/ready` needs a key, `/metrics` and paths that do not exist
included: `Authorization: Bearer KEY`, or else the answer is 401. Keys travel as they are, so put a proxy with TLS in
front before you open the port to others.

The name, not the key, is whose share of the engine a request uses: a key can be replaced without losing anything, and
two gateways of one engine must not give one name to different people. Cached prompts are found again within one name
and one `cache_salt` only, so that nobody can find out by the time of an answer what others have asked. With
`shares_prefix = true`, or with `--share-prefix-cache` for all keys that do not say otherwise, a key's prompts are
shared with the others that share, and still count as its own. A stream can be attached to by its own name alone.

## Web pages

A browser lets a page of any site open a WebSocket to any server, also to one on the user's own machine. So the
gateway compares the handshake's `Origin`, which browsers send and other clients do not, with the `Host` that it was
asked for, and answers 403 when they differ. `--allowed-origins` names other sites whose pages may connect; behind a
proxy that changes `Host`, name the public address there or have the proxy pass `Host` on.
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
