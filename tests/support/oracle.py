"""What transformers generates in float32 with the reference model, and how to compare with it.

tests/data/smol135m-greedy.json and smol135m-sampled.json hold it, and say how they were made.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from streamkv.sampling import SamplingParams

_DATA = Path(__file__).parents[1] / "data"

FLOAT32_NEAR_TIE = 1e-3
BFLOAT16_NEAR_TIE = 0.25


@dataclass(frozen=True)
class Case:
    name: str
    prompt: list[int]
    tokens: list[int]
    margins: list[float]
    """Per step: the highest logit over the second."""

    def begun(self, num_tokens: int) -> "Case":
        """The same with so many of its tokens as a part of the prompt."""
        prompt = self.prompt + self.tokens[:num_tokens]
        return Case(f"{self.name}+{num_tokens}", prompt, self.tokens[num_tokens:], self.margins[num_tokens:])

    def first(self, num_tokens: int) -> "Case":
        """The same, ended after so many tokens."""
        return Case(self.name, self.prompt, self.tokens[:num_tokens], self.margins[:num_tokens])


CASES = [
    Case(case["name"], case["prompt_token_ids"], case["token_ids"], case["margins"])
    for case in json.loads((_DATA / "smol135m-greedy.json").read_text())["cases"]
]
SHORT = [case for case in CASES if len(case.prompt) < 150]


@dataclass(frozen=True)
class SampledCase:
    """What a request with these settings gets. Moving logits by far more than float32's rounding changed no draw."""

    name: str
    """Its prompt is that of the greedy case."""
    seed: int
    settings: dict[str, Any]
    """Of the request, as the API names them."""
    token_ids: list[list[int]]
    """By choice."""
    texts: list[str]

    @property
    def prompt(self) -> list[int]:
        (prompt,) = [case.prompt for case in SHORT if case.name == self.name]
        return prompt

    def sampling(self) -> SamplingParams:
        settings = dict(self.settings)
        biases = {int(token_id): bias for token_id, bias in settings.pop("logit_bias", {}).items()}
        n, max_tokens = len(self.token_ids), len(self.token_ids[0])
        return SamplingParams(
            seed=self.seed, max_tokens=max_tokens, ignore_eos=True, n=n, logit_bias=biases, **settings
        )


def read_sampled_cases() -> list[SampledCase]:
    return [SampledCase(**case) for case in json.loads((_DATA / "smol135m-sampled.json").read_text())["cases"]]


def check(case: Case, tokens: list[int], near_tie: float = FLOAT32_NEAR_TIE) -> None:
    """Equal to the oracle, up to a first difference at a step where it was nearly a tie."""
    assert len(tokens) == len(case.tokens)
    for step, (got, wanted, margin) in enumerate(zip(tokens, case.tokens, case.margins, strict=True)):
        if got != wanted:
            assert margin < near_tie, f"{case.name}: step {step} gave {got} and not {wanted}, by a margin of {margin}"
            return
