"""A gateway reduced to its wire: sends messages, keeps what comes back, request by request. Synchronous."""

import time
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any, TypeVar

import zmq

from streamkv.protocol import (
    WIRE_VERSION,
    Attached,
    EngineMessage,
    Finished,
    GatewayMessage,
    Heartbeat,
    Hello,
    PromptLogprobs,
    Ready,
    StepOutput,
    Submit,
    TokenLogprobs,
    decode_from_engine,
    encode,
    pack_ids,
    unpack_ids,
)
from streamkv.sampling import SamplingParams
from streamkv.transport import new_gateway_id

M = TypeVar("M")


def submission(
    request_id: int, prompt: list[int], max_tokens: int = 16, *, stream_id: bytes | None = None, n: int = 1, **more: Any
) -> Submit:
    """A greedy Submit; its stream_id is made of its request id unless given."""
    sampling = more.pop("sampling", None) or SamplingParams(seed=7, max_tokens=max_tokens, n=n, temperature=0.0)
    return Submit(request_id, stream_id or request_id.to_bytes(16, "big"), pack_ids(prompt), sampling, **more)


@dataclass
class Received:
    """What came for one request."""

    tokens: defaultdict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    """By choice."""
    finished: dict[int, Finished] = field(default_factory=dict)
    attached: Attached | None = None
    logprobs: defaultdict[int, list[TokenLogprobs]] = field(default_factory=lambda: defaultdict(list))
    """By choice, as they came: each of one or more tokens."""
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)


class WireGateway:
    """Heartbeats go out while it pumps; they acknowledge what came in unless `auto_acknowledge` is off."""

    def __init__(
        self,
        endpoint: str,
        *,
        gateway_id: bytes = b"",
        say_hello: bool = True,
        auto_acknowledge: bool = True,
        heartbeat_s: float = 1.0,
    ) -> None:
        self.gateway_id = gateway_id or new_gateway_id()
        self.auto_acknowledge = auto_acknowledge
        self.requests: defaultdict[int, Received] = defaultdict(Received)
        self.messages: list[EngineMessage] = []
        """Everything but StepOutputs and Attached, in order."""
        self.steps: list[int] = []
        self.num_bytes = 0
        """Of StepOutput frames."""
        self.epoch = 0
        self._heartbeat_s = heartbeat_s
        self._next_heartbeat_s = time.monotonic() + heartbeat_s
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.ROUTING_ID, self.gateway_id)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.connect(endpoint)
        if say_hello:
            self.send(Hello(WIRE_VERSION, self.gateway_id))

    def __enter__(self) -> "WireGateway":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._socket.close()
        self._context.term()

    def send(self, message: GatewayMessage) -> None:
        self._socket.send(encode(message))

    def send_frame(self, *parts: bytes) -> None:
        """Raw bytes, one message."""
        self._socket.send_multipart(parts)

    def acknowledge(self) -> None:
        self.send(Heartbeat(self.steps[-1] if self.steps else 0, self.epoch))

    def pump(self, timeout_s: float = 0.05) -> bool:
        """Take in one frame; False if none came in time."""
        if time.monotonic() >= self._next_heartbeat_s:
            self._next_heartbeat_s = time.monotonic() + self._heartbeat_s
            self.send(Heartbeat(self.steps[-1] if self.steps and self.auto_acknowledge else 0, self.epoch))
        if not self._socket.poll(int(min(timeout_s, self._heartbeat_s) * 1000)):
            return False
        frame = self._socket.recv()
        message = decode_from_engine(frame)
        if isinstance(message, StepOutput):
            self.num_bytes += len(frame)
            self._take(message)
            if self.auto_acknowledge:
                self.acknowledge()
        elif isinstance(message, Attached):
            received = self.requests[message.request_id]
            received.attached = message
            for choice, tokens in enumerate(message.token_ids):
                received.tokens[choice] += unpack_ids(tokens)
            received.finished |= {end.choice: end for end in message.finished}
        else:
            if isinstance(message, Ready | Heartbeat):
                self.epoch = message.epoch
            self.messages.append(message)
        return True

    def _take(self, output: StepOutput) -> None:
        assert not self.steps or output.step >= self.steps[-1], "step numbers must not go back"
        self.steps.append(output.step)
        request_ids, token_ids = unpack_ids(output.request_ids), unpack_ids(output.token_ids)
        counts = unpack_ids(output.num_tokens) if output.num_tokens else [1] * len(request_ids)
        choices = unpack_ids(output.choices) if output.choices else [0] * len(request_ids)
        assert sum(counts) == len(token_ids)
        start = 0
        for request_id, choice, count in zip(request_ids, choices, counts, strict=True):
            received = self.requests[request_id]
            assert choice not in received.finished, "tokens after the end"
            received.tokens[choice] += token_ids[start : start + count]
            start += count
        for told in output.logprobs:
            assert told.values.num_tokens == counts[told.row]
            self.requests[request_ids[told.row]].logprobs[choices[told.row]].append(told.values)
        for part in output.prompt_logprobs:
            self.requests[part.request_id].prompt_logprobs.append(part)
        for end in output.finished:
            received = self.requests[end.request_id]
            assert end.choice not in received.finished, "a choice ended twice"
            received.finished[end.choice] = end

    def pump_for(self, seconds: float) -> None:
        """Take in whatever comes in this time."""
        until_s = time.monotonic() + seconds
        while (left_s := until_s - time.monotonic()) > 0:
            self.pump(left_s)

    def wait_for(self, kind: type[M], timeout_s: float = 30.0) -> M:
        """The first message of this kind that is there or comes; it is taken out of `messages`."""
        until_s = time.monotonic() + timeout_s
        while True:
            for index, message in enumerate(self.messages):
                if isinstance(message, kind):
                    del self.messages[index]
                    return message
            assert time.monotonic() < until_s, f"no {kind.__name__} came; there are {self.messages}"
            self.pump()

    def wait_tokens(self, request_id: int, num_tokens: int, choice: int = 0, timeout_s: float = 30.0) -> list[int]:
        """The choice's tokens once there are so many."""
        until_s = time.monotonic() + timeout_s
        while len(self.requests[request_id].tokens[choice]) < num_tokens:
            assert time.monotonic() < until_s, f"{len(self.requests[request_id].tokens[choice])} tokens came"
            self.pump()
        return self.requests[request_id].tokens[choice]

    def wait_end(self, request_id: int, num_choices: int = 1, timeout_s: float = 30.0) -> Received:
        """What came for a request, once every choice has ended."""
        until_s = time.monotonic() + timeout_s
        while len(self.requests[request_id].finished) < num_choices:
            assert time.monotonic() < until_s, f"request {request_id} has not ended; messages: {self.messages}"
            self.pump()
        return self.requests[request_id]
