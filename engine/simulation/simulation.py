"""A scenario played on a virtual clock, and every promise checked on the way.

Clients send, abort, stop reading and go on; the engine dies and comes back. After every turn KV memory is audited;
every token is compared with what the model says without any block; at the end everybody has ended, once and truly,
and nothing is left in memory that is not free or cached.
"""

import heapq
import random
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from math import inf
from typing import Final

from engine.scheduling.queue import QueueFull
from engine.sequence import Request, SequenceOutput
from engine.simulation.device import SimulatedDisk
from engine.simulation.expectation import right_endings
from engine.simulation.life import EngineLife
from engine.simulation.patience import Patience
from engine.simulation.scenario import ClientRequest, Restart, Scenario
from engine.simulation.simulated_model import Ending
from streamkv.protocol import TokenLogprobs

_PATIENCE_LENGTHS: Final = 4
"""Steps over which somebody may be passed over for each tenant, in lengths of the longest sequence."""
_MAX_TURNS: Final = 100_000
_MAX_TURNS_AT_ONCE: Final = 1000
_RETRY_S: Final = 0.2

Trace = Callable[[float, str], None]
"""Called with the time and what happened."""


class SimulationFailure(AssertionError):
    """A promise was broken. The text says when and which."""


@dataclass(slots=True)
class Stream:
    """What a client has of its request."""

    wish: ClientRequest
    right: list[list[Ending]]
    """What is right, choice by choice, if nobody interferes. Where there are several such lists, what has come so far
    agrees with each."""
    tokens: list[list[int]]
    ends: dict[int, tuple[str, str]] = field(default_factory=dict)
    """choice → (finish_reason, cause), once it has ended."""
    request: Request | None = None
    """In the engine's present life."""
    deadline_at_s: float = inf
    is_paused: bool = False
    is_resumable: bool = True
    aborted_for: dict[int, str] = field(default_factory=dict)
    """choice → the cause of an abort that was asked for."""
    num_lives: int = 0
    num_prompt_told: int = 1
    """Tokens of the prompt whose log probabilities have come in this life, with the first, which has none."""

    @property
    def name(self) -> str:
        return f"request {self.wish.index}"

    @property
    def is_finished(self) -> bool:
        return len(self.ends) == len(self.tokens)


@dataclass(slots=True)
class Summary:
    """What a run has seen."""

    num_turns: int = 0
    num_steps: int = 0
    num_tokens: int = 0
    preemptions: Counter[str] = field(default_factory=Counter)
    num_hit_tokens: int = 0
    num_host_tokens: int = 0
    num_disk_tokens: int = 0
    """Tokens that came up from there."""
    num_damaged_blocks: int = 0
    num_lives: int = 1
    num_refused: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    simulated_s: float = 0.0
    longest_passed: int = 0
    """Steps over which somebody was passed over by others that came much later."""

    def counts(self) -> dict[str, int]:
        """Everything that can be added up, by name."""
        return {
            "turns": self.num_turns,
            "steps": self.num_steps,
            "tokens": self.num_tokens,
            **{f"preempted to {kind}": count for kind, count in self.preemptions.items()},
            "tokens found in the cache": self.num_hit_tokens,
            "tokens from host memory": self.num_host_tokens,
            "tokens from disk": self.num_disk_tokens,
            "damaged blocks": self.num_damaged_blocks,
            "engine lives": self.num_lives,
            "refused": self.num_refused,
            **{f"ended with {reason}": count for reason, count in self.reasons.items()},
        }


def run_scenario(scenario: Scenario, trace: Trace | None = None) -> Summary:
    """Play it to its end. Raises SimulationFailure."""
    return _Run(scenario, trace).play()


class _Run:
    def __init__(self, scenario: Scenario, trace: Trace | None) -> None:
        self._scenario = scenario
        self._trace = trace
        self._dice = random.Random(f"run {scenario.seed}")
        self._now_s = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._num_events = 0
        self._streams: dict[int, Stream] = {}
        self._live: dict[int, Stream] = {}
        self._of_request: dict[Request, Stream] = {}
        self._turns_of: dict[int, list[ClientRequest]] = {}
        self._failures = {
            (wish.sampling.seed, choice): after for wish in scenario.requests for choice, after in wish.fails_at.items()
        }
        self._disk = SimulatedDisk()
        self._life: EngineLife | None = None
        self._ending: EngineLife | None = None
        """One that writes to disk what it has cached, at most until _flush_until_s."""
        self._flush_until_s = 0.0
        self._patience: Patience
        self._num_refused = 0
        """Events that ask again for what was refused."""
        self._unacknowledged: list[tuple[Stream, int]] = []
        self.summary = Summary()

    def play(self) -> Summary:
        try:
            self._begin()
            self._loop()
            self._check_all_ended()
        except AssertionError as fault:
            message = f"at {self._now_s:.6f} s: {type(fault).__name__}: {fault}"
            raise SimulationFailure(message) from fault
        self.summary.simulated_s = self._now_s
        return self.summary

    # time

    def _begin(self) -> None:
        for wish in self._scenario.requests:
            if wish.previous < 0:
                self._at(wish.at_s, lambda wish=wish: self._send(wish))  # type: ignore[misc]
            else:
                self._turns_of.setdefault(wish.previous, []).append(wish)
        for restart in self._scenario.restarts:
            self._at(restart.at_s, lambda restart=restart: self._end_life(restart))  # type: ignore[misc]
        self._start_life()

    def _at(self, at_s: float, action: Callable[[], None]) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (at_s, self._num_events, action))

    def _loop(self) -> None:
        num_at_once, before_s = 0, -1.0
        for _ in range(_MAX_TURNS):
            self._turn()
            num_at_once = num_at_once + 1 if self._now_s == before_s else 0
            before_s = self._now_s
            assert num_at_once < _MAX_TURNS_AT_ONCE, "turn after turn, and time stands still"
            if self._is_idle():
                if self._go_on():
                    continue
                if not self._events:
                    return
            life_s = self._life.next_event_s if self._life is not None else inf
            flush_s = min(self._ending.executor.next_event_s, self._flush_until_s) if self._ending is not None else inf
            next_s = min(life_s, flush_s, self._events[0][0] if self._events else inf)
            assert next_s < inf, "nothing will ever happen"
            self._now_s = max(self._now_s, next_s)
        raise AssertionError(f"not done after {_MAX_TURNS} turns")

    def _is_idle(self) -> bool:
        """Nothing happens any more, but that those whom a full queue has refused ask again."""
        life = self._life
        return len(self._events) == self._num_refused and life is not None and life.next_event_s == inf

    def _go_on(self) -> bool:
        """Those who waited to the very end go on, or go away. Whether there were any."""
        stuck = [stream for stream in self._live.values() if stream.request is not None]
        if not stuck:
            return False
        for stream in stuck:
            assert stream.is_paused, f"{stream.name} was not paused, and nothing will ever happen to it"
        for stream in self._dice.sample(stuck, len(stuck)):
            if self._dice.random() < 0.7:
                stream.is_resumable = True
                self._resume(stream)
            else:
                self._abort(stream, -1, "cancelled")
        return True

    def _turn(self) -> None:
        self.summary.num_turns += 1
        while self._events and self._events[0][0] <= self._now_s:
            heapq.heappop(self._events)[2]()
        if self._ending is not None and (self._ending.flush() or self._now_s >= self._flush_until_s):
            self._ending = None
            self._at(self._now_s, self._start_life)
        if self._life is None:
            return
        if self._scenario.meddle_odds and self._dice.random() < self._scenario.meddle_odds and self._live:
            self._meddle()
        life = self._life
        for outputs in life.turn():
            self._take(outputs)
        for stream, choice in self._unacknowledged:
            assert choice in stream.ends, f"{stream.name}, choice {choice}: an abort was not acknowledged"
        self._unacknowledged.clear()
        self._patience.look(
            [sequence for stream in self._live.values() if stream.request for sequence in stream.request.sequences],
            life.num_planned,
            self._now_s,
        )

    # the engine

    def _start_life(self) -> None:
        self._say("the engine starts")
        self._life = EngineLife(
            self._scenario.setup,
            self._disk,
            lambda: self._now_s,
            self._dice,
            self._failures,
            {wish.sampling.seed: wish.namespace for wish in self._scenario.requests},
            self._say if self._trace is not None else None,
        )
        self._of_request.clear()
        setup = self._scenario.setup
        num_tenants = len({wish.tenant for wish in self._scenario.requests})
        blocks = self._life.blocks
        self._patience = Patience(
            setup.ageing_s,
            _PATIENCE_LENGTHS * setup.max_len * num_tenants,
            lambda sequence: blocks.has_tiers and blocks.find(sequence).is_arriving,
        )
        for stream in self._live.values():
            self._submit(stream)

    def _end_life(self, restart: Restart) -> None:
        if self._life is None:
            return
        self._say("the engine is asked to end" if restart.is_asked else "the engine dies")
        self._retire(self._life)
        life, self._life = self._life, None
        self.summary.num_lives += 1
        for stream in self._live.values():
            stream.request = None
        if restart.is_asked:
            life.executor.abandon_steps()
            life.begin_flush()
            self._ending, self._flush_until_s = life, self._now_s + restart.takes_s
            return
        if not restart.keeps_disk:
            self._disk = SimulatedDisk()
        self._at(self._now_s + restart.takes_s, self._start_life)

    def _retire(self, life: EngineLife) -> None:
        life.check_content()
        summary, counts = self.summary, life.scheduler.counts
        summary.longest_passed = max(summary.longest_passed, self._patience.longest_steps)
        summary.num_steps += life.executor.num_steps
        summary.preemptions.update(counts.preemptions)
        summary.num_hit_tokens += counts.num_prefix_hit_tokens
        tiers = life.blocks.tier_counts
        summary.num_host_tokens += tiers.num_host_hit_tokens
        summary.num_disk_tokens += tiers.num_disk_hit_tokens
        summary.num_damaged_blocks += tiers.num_damaged_disk_blocks

    # clients

    def _send(self, wish: ClientRequest) -> None:
        right = right_endings(wish, self._scenario.setup)
        tokens: list[list[int]] = [[] for _ in range(wish.sampling.n)]
        stream = Stream(wish, right, tokens, deadline_at_s=self._now_s + wish.deadline_s)
        self._streams[wish.index] = self._live[wish.index] = stream
        if wish.abort_after_s < inf:
            self._at(self._now_s + wish.abort_after_s, lambda: self._abort(stream, wish.abort_choice, "cancelled"))
        for pause in wish.pauses:
            self._at(self._now_s + pause.after_s, lambda pause=pause: self._pause(stream, pause.for_s))  # type: ignore[misc]
        self._submit(stream)

    def _submit(self, stream: Stream) -> None:
        """To a new engine it goes as prompt and tokens so far."""
        if self._life is None or stream.is_finished or stream.request is not None:
            return
        wish = stream.wish
        scheduler = self._life.scheduler
        try:
            scheduler.check(len(wish.prompt), wish.sampling)
        except QueueFull:
            self.summary.num_refused += 1
            self._num_refused += 1
            self._at(self._now_s + _RETRY_S, lambda: self._ask_again(stream))
            return
        request = Request(
            request_id=wish.index,
            gateway_id=b"",
            stream_id=wish.index.to_bytes(16, "little"),
            prompt_token_ids=list(wish.prompt),
            sampling=wish.sampling,
            arrival_s=self._now_s,
            priority=wish.priority,
            deadline_at_s=stream.deadline_at_s,
            tenant=wish.tenant,
            cache_salt=wish.cache_salt,
            shares_prefix=wish.shares_prefix,
            prior_token_ids=[list(tokens) for tokens in stream.tokens] if any(stream.tokens) else [],
            finished_choices=sorted(stream.ends),
        )
        scheduler.add(request)
        stream.request = request
        stream.num_lives += 1
        stream.num_prompt_told = 1
        self._of_request[request] = stream
        if self._trace is not None:
            ids = [sequence.sequence_id for sequence in request.sequences]
            self._say(
                f"{stream.name} arrives as sequences {ids}: {len(wish.prompt)} tokens, {stream.tokens} before, "
                f"priority {wish.priority}, deadline {stream.deadline_at_s:.4f}, {wish.sampling}"
            )
        if stream.is_paused:
            scheduler.pause(request)

    def _ask_again(self, stream: Stream) -> None:
        self._num_refused -= 1
        self._submit(stream)

    def _abort(self, stream: Stream, choice: int, cause: str) -> None:
        if stream.is_finished:
            return
        self._say(f"{stream.name} is aborted, choice {choice}")
        for index in range(len(stream.tokens)):
            if index not in stream.ends and (choice in (-1, index) or stream.wish.sampling.ranks_choices):
                stream.aborted_for.setdefault(index, cause)
        if self._life is not None and stream.request is not None:
            self._take(self._life.scheduler.abort(stream.request, cause, choice))
            self._unacknowledged += [(stream, index) for index in stream.aborted_for]
        else:
            for index in stream.aborted_for:
                if index not in stream.ends:
                    self._end(stream, index, "abort", cause)

    def _pause(self, stream: Stream, for_s: float) -> None:
        if stream.is_finished or stream.is_paused:
            return
        self._say(f"{stream.name} stops reading for {for_s:.4f} s")
        stream.is_paused, stream.is_resumable = True, for_s < inf
        if self._life is not None and stream.request is not None:
            self._life.scheduler.pause(stream.request)
            self._patience.forget(stream.request.sequences)
        if for_s < inf:
            self._at(self._now_s + for_s, lambda: self._resume(stream))

    def _resume(self, stream: Stream) -> None:
        if stream.is_finished or not stream.is_paused or not stream.is_resumable:
            return
        self._say(f"{stream.name} reads again")
        stream.is_paused = False
        if self._life is not None and stream.request is not None:
            self._life.scheduler.resume(stream.request)

    def _meddle(self) -> None:
        """Something happens to somebody just now, whatever it is doing."""
        stream = self._dice.choice(list(self._live.values()))
        match self._dice.randrange(4):
            case 0:
                self._abort(stream, self._dice.choice((-1, -1, 0)), "disconnected")
            case 1 | 2 if not stream.is_paused:
                self._pause(stream, self._dice.choice((0.0, 0.02, 0.3)))
            case _:
                self._resume(stream)

    # what comes out

    def _take(self, outputs: Iterable[SequenceOutput]) -> None:
        for output in outputs:
            sequence = output.sequence
            stream = self._of_request[sequence.request]
            if output.prompt_logprobs is not None:
                self._take_prompt(stream, *output.prompt_logprobs)
                continue
            choice = sequence.choice
            who = f"{stream.name}, choice {choice}"
            self._check_logprobs(stream, output, who)
            assert choice not in stream.ends, f"{who}: something came after its end: {output}"
            tokens = stream.tokens[choice]
            tokens += output.token_ids
            self.summary.num_tokens += len(output.token_ids)
            if output.finish_reason == "abort":
                self._check_abort(stream, choice, output)
                right = [endings for endings in stream.right if endings[choice].token_ids[: len(tokens)] == tokens]
                assert right, f"{who}: wrong token: {tokens}, right are {stream.right}"
                self._end(stream, choice, "abort", output.cause)
                continue
            came = Ending(tokens, output.finish_reason, output.cause, output.stop_token_id)
            stream.right, had = [e for e in stream.right if _is_right(came, e[choice])], stream.right
            assert stream.right, f"{who}: came {came}, right is {[endings[choice] for endings in had]}"
            if not output.finish_reason:
                assert output.token_ids, f"{who}: neither a token nor an end"
                continue
            self._end(stream, choice, output.finish_reason, output.cause)

    def _check_logprobs(self, stream: Stream, output: SequenceOutput, who: str) -> None:
        """Of the tokens that came, and that the prompt's came before them."""
        wish = stream.wish
        sampling, prompt = wish.sampling, wish.prompt
        if not output.token_ids:
            return
        if sampling.prompt_logprobs >= 0:
            assert stream.num_prompt_told == len(prompt), f"{who}: {stream.num_prompt_told} of {len(prompt)} were told"
            num_cached = output.sequence.num_cached_tokens
            assert len(prompt) == 1 or not num_cached, f"{who}: {num_cached} tokens of its prompt were not computed"
        right = None
        if sampling.logprobs >= 0:
            position = len(prompt) + len(stream.tokens[output.sequence.choice])
            right = self._scenario.setup.model.logprobs(output.token_ids, position, sampling.logprobs)
        assert output.logprobs == right, f"{who}: wrong log probabilities: {output.logprobs}, right are {right}"

    def _take_prompt(self, stream: Stream, start: int, values: TokenLogprobs) -> None:
        """Parts of a prompt may overlap, but leave nothing out."""
        wish, end = stream.wish, start + values.num_tokens
        right = self._scenario.setup.model.logprobs(wish.prompt[start:end], start, wish.sampling.prompt_logprobs)
        assert values == right, f"{stream.name}, its prompt from {start}: {values}, right are {right}"
        assert 1 <= start <= stream.num_prompt_told, f"{stream.name}: nothing told from {stream.num_prompt_told}"
        stream.num_prompt_told = max(stream.num_prompt_told, end)

    def _check_abort(self, stream: Stream, choice: int, output: SequenceOutput) -> None:
        who = f"{stream.name}, choice {choice}"
        if output.cause == "deadline":
            assert self._now_s >= stream.deadline_at_s, f"{who}: aborted before its deadline {stream.deadline_at_s}"
        else:
            asked = stream.aborted_for.get(choice)
            assert asked == output.cause, f"{who}: aborted for {output.cause}, asked for {asked}"

    def _end(self, stream: Stream, choice: int, reason: str, cause: str) -> None:
        self._say(f"{stream.name}, choice {choice} ends: {reason} {cause}")
        stream.ends[choice] = reason, cause
        self.summary.reasons[reason] += 1
        if stream.is_finished:
            del self._live[stream.wish.index]
            for wish in self._turns_of.pop(stream.wish.index, []):
                self._at(self._now_s + wish.at_s, lambda wish=wish: self._send(wish))  # type: ignore[misc]

    def _check_all_ended(self) -> None:
        assert not self._live and len(self._streams) == len(self._scenario.requests), "not every request has ended"
        assert self._life is not None
        self._life.check_idle()
        self._retire(self._life)

    def _say(self, text: str) -> None:
        if self._trace is not None:
            self._trace(self._now_s, text)


def _is_right(came: Ending, right: Ending) -> bool:
    """Whether a choice has come to this end, or is on its way there."""
    if came.finish_reason:
        return replace(came, total=right.total) == right
    is_on_its_way = len(came.token_ids) < len(right.token_ids) or right.finish_reason == "error"
    return is_on_its_way and came.token_ids == right.token_ids[: len(came.token_ids)]
