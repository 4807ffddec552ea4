"""Structured output by the whole engine below the loop, and over the wire: a random model, so that all that is right in
what it writes comes from the grammar."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from engine.execution.runner import CpuRunner
from engine.kv.audit import audit
from engine.kv.block_manager import BlockManager
from engine.plan import NewSequence, ScheduledSequence, StepPlan
from engine.scheduling.limits import SchedulerLimits
from engine.scheduling.scheduler import Scheduler
from engine.sequence import Request, SequenceOutput
from streamkv.config import EngineConfig
from streamkv.protocol import Abort, Ready, Rejected, pack_ids, unpack_floats
from streamkv.sampling import Grammar, SamplingParams
from tests.support.scripted_engine import serving
from tests.support.small_tokenizers import train_byte_level
from tests.support.wire_gateway import WireGateway, submission

BLOCK_SIZE = 4
EOS = 2
PROMPT = [40, 50, 60, 70, 80, 90, 100]
CITY = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Köln", "東京", "New York"]},
        "size": {"type": "integer", "minimum": 1, "maximum": 9999},
        "old": {"type": "boolean"},
    },
    "required": ["city", "size"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_pattern": " "},
}


def is_city(text: str) -> bool:
    value = json.loads(text)
    return (
        {"city", "size"} <= set(value) <= {"city", "size", "old"}
        and value["city"] in CITY["properties"]["city"]["enum"]
        and type(value["size"]) is int
        and 1 <= value["size"] <= 9999
        and value.get("old") in (None, True, False)
    )


KINDS = {
    "schema": (Grammar("json_schema", json.dumps(CITY)), is_city),
    "regex": (Grammar("regex", r"\d{2,6}(é|中){1,3}"), lambda text: re.fullmatch(r"[0-9]{2,6}(é|中){1,3}", text)),
    "choice": (Grammar("choice", '["yes", "yesterday", "no 😀"]'), lambda text: text in ("yes", "yesterday", "no 😀")),
    "lark": (
        Grammar("lark", 'start: "<" x ">"\nx: "a" x "b" | "c"\n'),
        lambda text: re.fullmatch(r"<a*cb*>", text) and text.count("a") == text.count("b"),
    ),
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_byte_level("gpt-2")


@pytest.fixture(scope="module")
def folder(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("structured")
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size() + 27,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        eos_token_id=EOS,
        initializer_range=0.3,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def make_runner(folder: Path) -> CpuRunner:
    return CpuRunner(
        EngineConfig(model=str(folder), dtype="float32", block_size=BLOCK_SIZE, max_num_seqs=16, threads=1)
    )


@pytest.fixture(scope="module")
def runner(folder: Path) -> Iterator[CpuRunner]:
    runner = make_runner(folder)
    runner.load(lambda stage, percent: None)
    yield runner
    runner.close()


@dataclass
class Ended:
    """What became of one choice."""

    tokens: list[int]
    reason: str
    cause: str
    num_preemptions: int


def run(
    runner: CpuRunner, requests: list[tuple[SamplingParams, list[list[int]]]], num_blocks: int = 500
) -> list[dict[int, Ended]]:
    """(sampling, prior tokens of each choice) of requests that come at once → their choices."""
    limits = SchedulerLimits(16, 256, 0, 16, True, 400, 64, (EOS,), preemption_mode="recompute")
    blocks = BlockManager(num_blocks + 1, BLOCK_SIZE)
    scheduler = Scheduler(limits, blocks, clock=lambda: 0.0)
    made = []
    for i, (sampling, priors) in enumerate(requests):
        made.append(Request(i, b"g", bytes(16), PROMPT, sampling, arrival_s=float(i), prior_token_ids=priors))
        scheduler.add(made[-1])
    ended: list[dict[int, Ended]] = [{} for _ in made]
    tokens: dict[tuple[int, int], list[int]] = {}

    def take(outputs: list[SequenceOutput]) -> None:
        for output in outputs:
            sequence = output.sequence
            own = tokens.setdefault((sequence.request.request_id, sequence.choice), [])
            own += output.token_ids
            if output.finish_reason:
                ended[sequence.request.request_id][sequence.choice] = Ended(
                    own, output.finish_reason, output.cause, sequence.num_preemptions
                )

    while plan := scheduler.plan():
        take(scheduler.update(plan, runner.collect(runner.launch(plan, lambda: None))))
    take(scheduler.expire())
    runner.collect(runner.launch(StepPlan(-1, [], finished_sequence_ids=scheduler._roster.finished_ids), lambda: None))
    audit(blocks)
    assert blocks.num_owned_blocks == 0
    return ended


def follows(grammar: Grammar, seed: int = 1, temperature: float = 1.0, **more: int) -> SamplingParams:
    return SamplingParams(
        seed=seed, max_tokens=more.pop("max_tokens", 200), temperature=temperature, grammar=grammar, **more
    )


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_random_model_writes_is_right_at_any_seed_and_temperature(
    runner: CpuRunner, tokenizer: Tokenizer, kind: str
) -> None:
    grammar, is_right = KINDS[kind]
    asked = [follows(grammar, seed, temperature) for seed in range(3) for temperature in (0.0, 0.7, 2.0)]
    num_complete = 0
    for (choice,) in [list(one.values()) for one in run(runner, [(sampling, []) for sampling in asked])]:
        if choice.reason == "length":
            assert kind == "lark" and len(choice.tokens) == 200  # the one that may go on for ever
            continue
        assert (choice.reason, choice.cause, choice.tokens[-1]) == ("stop", "eos", EOS)
        assert EOS not in choice.tokens[:-1]
        assert is_right(tokenizer.decode(choice.tokens)), tokenizer.decode(choice.tokens)
        num_complete += 1
    assert num_complete > len(asked) // 2


def test_max_tokens_cuts_it_and_says_length(runner: CpuRunner, tokenizer: Tokenizer) -> None:
    grammar, _ = KINDS["schema"]
    whole = run(runner, [(follows(grammar), [])])[0][0].tokens
    for max_tokens in (1, 5, len(whole) - 1):
        cut = run(runner, [(follows(grammar, max_tokens=max_tokens), [])])[0][0]
        assert (cut.reason, cut.tokens) == ("length", whole[:max_tokens])
    exact = run(runner, [(follows(grammar, max_tokens=len(whole)), [])])[0][0]
    assert (exact.reason, exact.tokens) == ("stop", whole)


def test_it_ends_where_it_must_whatever_else_is_asked_of_the_sampler(runner: CpuRunner, tokenizer: Tokenizer) -> None:
    grammar, is_right = KINDS["choice"]
    letters = {tokenizer.token_to_id(letter): -100.0 for letter in "yn"}
    asked = [
        follows(grammar, min_tokens=100),
        follows(grammar, ignore_eos=False, logit_bias={EOS: -100.0}),
        follows(grammar, logit_bias=letters, repetition_penalty=5.0, presence_penalty=2.0),
        follows(grammar, top_k=1, top_p=0.1, min_p=0.9),
    ]
    for (choice,) in [list(one.values()) for one in run(runner, [(sampling, []) for sampling in asked])]:
        assert (choice.reason, choice.cause) == ("stop", "eos")
        assert is_right(tokenizer.decode(choice.tokens))


def test_it_does_not_depend_on_who_runs_beside_it(runner: CpuRunner) -> None:
    grammar, _ = KINDS["schema"]
    plain = SamplingParams(seed=4, max_tokens=30, temperature=1.0, ignore_eos=True)
    alone = run(runner, [(follows(grammar), [])])[0][0].tokens
    others = [(plain, []), (follows(KINDS["regex"][0]), [])]
    beside = run(runner, [(follows(grammar), []), *others])
    assert beside[0][0].tokens == alone
    without = run(runner, [(follows(KINDS["lark"][0]), []), (plain, [])])
    assert without[1][0].tokens == beside[1][0].tokens


@pytest.mark.parametrize("kind", KINDS)
def test_a_continuation_at_every_cut_gives_the_same_tokens(runner: CpuRunner, kind: str) -> None:
    grammar, _ = KINDS[kind]
    whole = run(runner, [(follows(grammar, max_tokens=40), [])])[0][0]
    cuts = [whole.tokens[:cut] for cut in range(1, len(whole.tokens))]
    continued = run(runner, [(follows(grammar, max_tokens=40), [prior]) for prior in cuts])
    for prior, again in zip(cuts, continued, strict=True):
        assert prior + again[0].tokens == whole.tokens
        assert (again[0].reason, again[0].cause) == (whole.reason, whole.cause)


def test_each_choice_follows_the_grammar_by_itself(runner: CpuRunner, tokenizer: Tokenizer) -> None:
    grammar, is_right = KINDS["schema"]
    choices = run(runner, [(follows(grammar, n=5), [])])[0]
    texts = [tokenizer.decode(choices[choice].tokens) for choice in range(5)]
    assert all(map(is_right, texts)) and len(set(texts)) > 1
    best = run(runner, [(follows(grammar, n=2, best_of=5), [])])[0]
    assert {tuple(choice.tokens) for choice in best.values()} <= {tuple(choice.tokens) for choice in choices.values()}
    assert len(best) == 2


def test_preemption_changes_nothing(runner: CpuRunner, tokenizer: Tokenizer) -> None:
    grammar, is_right = KINDS["schema"]
    asked = [(follows(grammar, seed), []) for seed in range(4)]
    roomy = run(runner, asked)
    tight = run(runner, asked, num_blocks=17)
    assert sum(one[0].num_preemptions for one in tight) > 0 == sum(one[0].num_preemptions for one in roomy)
    for one, other in zip(tight, roomy, strict=True):
        assert one[0].tokens == other[0].tokens and is_right(tokenizer.decode(one[0].tokens))


# Over the wire


def test_a_new_engine_goes_on_in_the_middle_of_an_object(folder: Path, tokenizer: Tokenizer) -> None:
    grammar, is_right = KINDS["schema"]
    sampling = follows(grammar, n=2)
    with serving(make_runner(folder)) as engine, WireGateway(engine.endpoint) as gateway:
        gateway.wait_for(Ready)
        gateway.send(submission(1, PROMPT, sampling=sampling))
        whole = dict(gateway.wait_end(1, num_choices=2).tokens)
        assert all(is_right(tokenizer.decode(tokens)) for tokens in whole.values())
    with serving(make_runner(folder)) as engine, WireGateway(engine.endpoint) as gateway:
        gateway.wait_for(Ready)
        priors = [pack_ids(whole[0][:7]), pack_ids(whole[1][:3])]
        gateway.send(submission(1, PROMPT, sampling=sampling, prior_token_ids=priors))
        rest = gateway.wait_end(1, num_choices=2).tokens
        assert (whole[0][:7] + rest[0], whole[1][:3] + rest[1]) == (whole[0], whole[1])


def test_hostile_grammars_harm_no_other_stream(folder: Path, tokenizer: Tokenizer) -> None:
    slow = {"type": "object", "properties": {f"p{i}": {} for i in range(2500)}}
    hostile = [
        Grammar("json_schema", json.dumps(slow), "response_format.json_schema.schema"),
        Grammar("json_schema", '{"type":"objekt"}', "guided_json"),
        Grammar("regex", "(" * 20_000, "guided_regex"),
        Grammar("json_schema", '{"anyOf":[' * 9000 + "{}" + "]}" * 9000, "guided_json"),
        Grammar("lark", "start: a\na: a", "guided_grammar"),
        Grammar("regex", "x|a{1000000}|b", "guided_regex"),
    ]
    plain = SamplingParams(seed=1, max_tokens=60, temperature=0.0, ignore_eos=True)
    with serving(make_runner(folder)) as engine, WireGateway(engine.endpoint) as gateway:
        gateway.wait_for(Ready)
        gateway.send(submission(50, PROMPT, sampling=plain))
        expected = gateway.wait_end(50).tokens[0]
        gateway.send(submission(100, PROMPT, sampling=plain))
        for request_id, grammar in enumerate(hostile):
            gateway.send(submission(request_id, PROMPT, sampling=follows(grammar)))
        gateway.send(Abort(0))
        gateway.send(submission(101, PROMPT, sampling=plain))
        assert gateway.wait_end(100).tokens[0] == gateway.wait_end(101).tokens[0] == expected
        assert gateway.wait_end(0).finished[0].finish_reason == "abort"
        rejected = {}
        for _ in range(4):
            answer = gateway.wait_for(Rejected, timeout_s=60.0)
            rejected[answer.request_id] = answer.field
        assert rejected == {1: "guided_json", 2: "guided_regex", 3: "guided_json", 4: "guided_grammar"}
        assert gateway.wait_end(5, timeout_s=60.0).finished[0].finish_reason in ("stop", "error")


def test_log_probabilities_are_the_models_own_and_not_those_of_what_is_left(runner: CpuRunner) -> None:
    grammar = Grammar("choice", '["yes", "no"]')
    told = {}
    for sequence_id, wanted in ((900, grammar), (901, None)):
        sampling = SamplingParams(seed=1, max_tokens=9, temperature=0.0, logprobs=20, grammar=wanted)
        facts = NewSequence(sequence_id, 0, sampling, 3, (EOS,), [7, 8, 9] if wanted else [])
        entry = ScheduledSequence(sequence_id, 0, 3, True, True, [7, 8, 9], [1])
        tokens = runner.collect(runner.launch(StepPlan(1, [entry], [facts]), lambda: None))
        told[sequence_id] = (tokens.token_ids[0], tokens.logprobs[sequence_id])
        runner.collect(runner.launch(StepPlan(2, [], finished_sequence_ids=[sequence_id]), lambda: None))
    (chosen, constrained), (freely, free) = told[900], told[901]
    assert constrained.top_ids == free.top_ids
    assert unpack_floats(constrained.top_logprobs) == pytest.approx(unpack_floats(free.top_logprobs), abs=1e-5)
    assert chosen != freely and unpack_floats(constrained.chosen)[0] < unpack_floats(free.chosen)[0]
