"""The command line: `streamkv serve | engine | gateway | chat | bench | simulate | health | fetch | keygen`.

Starts each part by its module's name and imports none of them, so that help and a wrong setting cost no
second of loading.
"""

import difflib
import os
import runpy
import sys
from collections.abc import Sequence
from typing import Final

from streamkv.config import EngineConfig, GatewayConfig, exit_with, load, load_both, to_argv
from streamkv.errors import ConfigError

VERSION: Final = "0.1.0"

COMMANDS: Final = {
    "serve": "serve a model over HTTP: the gateway, and the engine as its child",
    "engine": "the engine alone: the process that owns the model and the device",
    "gateway": "the gateway alone, for an engine that runs elsewhere (--endpoint)",
    "chat": "talk to a model in the terminal; works with any OpenAI-compatible server",
    "bench": "load any OpenAI-compatible server with a workload or a recorded trace, and report its latency",
    "simulate": "the scheduler and KV memory on a simulated device: a workload's figures, or random faults from a seed",
    "health": "whether a server takes work, as an exit status",
    "fetch": "download a model ahead of the first start",
    "keygen": "make the key pair that an engine or a gateway needs for tcp between machines",
}

SUPERVISE: Final = "--supervise"
"""streamkv engine: as the child of a supervisor, which starts it again when it ends or hangs."""

USAGE: Final = f"""\
StreamKV {VERSION}: streams a language model to many clients, from one GPU or a CPU.

  streamkv COMMAND [--flag VALUE ...]

{chr(10).join(f"  {name:<9} {text}" for name, text in COMMANDS.items())}

  streamkv COMMAND --help    every flag of a command
  streamkv --version

Start here:
  streamkv serve             serves the built-in model at http://127.0.0.1:8000
  streamkv chat              in a second terminal
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command to its end. Returns its exit status, or raises SystemExit; 2: wrong command or setting."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help", "help"):
        print(USAGE, end="")
        return 0 if words else 2
    command, *flags = words
    if command == "--version":
        print(f"streamkv {VERSION}")
        return 0
    if command not in COMMANDS:
        near = difflib.get_close_matches(command, COMMANDS, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        print(f"streamkv: no such command: {command}{hint} (see streamkv --help)", file=sys.stderr)
        return 2
    if command in ("serve", "engine", "gateway"):
        if not {"-h", "--help"}.isdisjoint(flags):
            print(f"streamkv {command}: {COMMANDS[command]}\n")
            if command == "engine":
                print(f"  {SUPERVISE}   start it again when it ends or hangs (the first process of a container)\n")
        try:
            module, flags = _start(command, flags)
        except ConfigError as error:
            exit_with(error)
    else:
        module = "engine.simulation" if command == "simulate" else f"streamkv.tools.{command}"
    sys.argv = [f"streamkv {command}", *flags]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except KeyboardInterrupt:  # before the program had its own answer to Ctrl-C
        return 130
    return 0


def _start(command: str, flags: Sequence[str]) -> tuple[str, list[str]]:
    """The module of a command and its flags. Settings are checked here, before anything slow is loaded."""
    if command == "serve":
        engine, gateway = load_both(flags, os.environ)
        return "gateway", [*to_argv(gateway), "--with-engine", *to_argv(engine)]
    if command == "engine":
        words = [flag for flag in flags if flag != SUPERVISE]
        load(EngineConfig, words, os.environ)
        if words != list(flags):
            return "gateway.supervised_engine", words
    else:
        load(GatewayConfig, flags, os.environ)
    return command, list(flags)
