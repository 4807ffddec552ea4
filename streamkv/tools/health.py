"""`streamkv health`: whether a server takes work, as an exit status. For the health checks of containers.

0: it takes work. 3: it lives and loads, with stage and percent. 1: it does not answer.
"""

import argparse
import json
import os
import sys
import time
import urllib.error
import urllib.request
from typing import Final

import zmq

from streamkv.errors import ConfigError, WireDecodeError
from streamkv.protocol import WIRE_VERSION, Heartbeat, Hello, Loading, Ready, decode_from_engine, encode
from streamkv.transport import default_endpoint, new_gateway_id

LOADING: Final = 3
_NO_ANSWER: Final = 1


def main() -> int:
    """Ask once and print the answer."""
    parser = argparse.ArgumentParser(
        prog="streamkv health",
        description="Asks a server whether it takes work. Ends with 0 if so, with 3 while it loads, else with 1.",
    )
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="of the gateway (default: %(default)s)")
    parser.add_argument("--engine", action="store_true", help="ask the engine at STREAMKV_ENDPOINT and no gateway")
    parser.add_argument("--timeout-s", type=float, default=5.0, help="how long to wait (default: %(default)s)")
    args = parser.parse_args()
    if args.engine:
        try:
            return ask_engine(os.environ.get("STREAMKV_ENDPOINT") or default_endpoint(), args.timeout_s)
        except ConfigError as error:
            print(error)
            return _NO_ANSWER
    return ask_gateway(args.url, args.timeout_s)


def ask_gateway(url: str, timeout_s: float) -> int:
    """What its /ready says."""
    try:
        with urllib.request.urlopen(url.rstrip("/") + "/ready", timeout=timeout_s):
            print("ready")
            return 0
    except urllib.error.HTTPError as error:
        try:
            said = json.load(error)
            print(f"{said['status']}: {said['stage']}, {said['percent']} %")
        except (ValueError, KeyError, TypeError):
            print(f"status {error.code}")
            return _NO_ANSWER
        return LOADING if error.code == 503 and said["status"] in ("loading", "connecting", "lost") else _NO_ANSWER
    except OSError as error:
        print(f"no answer from {url}: {error}")
        return _NO_ANSWER


def ask_engine(endpoint: str, timeout_s: float) -> int:
    """What it answers to a Hello. An ipc socket needs no keys; through tcp, ask a gateway."""
    if not endpoint.startswith("ipc://"):
        print("only an engine at an ipc socket can be asked")
        return _NO_ANSWER
    gateway_id = new_gateway_id()
    until_s = time.monotonic() + timeout_s
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.ROUTING_ID, gateway_id)
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(endpoint)
        socket.send(encode(Hello(WIRE_VERSION, gateway_id)))
        while (left_s := until_s - time.monotonic()) > 0 and socket.poll(int(left_s * 1000)):
            try:
                message = decode_from_engine(socket.recv())
            except WireDecodeError as error:
                print(f"it speaks another version: {error}")
                return _NO_ANSWER
            if isinstance(message, Ready):
                print("ready")
                return 0
            if isinstance(message, Loading):
                print(f"loading: {message.stage}, {message.percent:.0f} %")
                return LOADING
            if not isinstance(message, Heartbeat):
                break
    print(f"no answer at {endpoint}")
    return _NO_ANSWER


if __name__ == "__main__":
    sys.exit(main())
