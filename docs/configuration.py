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
`STREAMKV_API_KEY` is what `streamkv chat` and `streamkv bench` send as their API key.
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
