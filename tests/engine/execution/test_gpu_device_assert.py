"""A device-side assert ends the engine's process at once and with a fault's code, and the next one goes on."""

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from engine.loop import EXIT_FAULT
from streamkv.protocol import Ready, pack_ids
from tests.support.scripted_engine import free_endpoint
from tests.support.wire_gateway import WireGateway, submission

PROMPT = list(range(10, 40))
NUM_TOKENS = 40
START_LIMIT_S = 240.0
END_LIMIT_S = 30.0
"""Far under the time after which its supervisor would take it for hung: it ends by itself."""


def make_model(folder: Path) -> Path:
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=1,
        eos_token_id=2,
        initializer_range=0.3,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@contextmanager
def running(endpoint: str, model: Path, step: int) -> "Iterator[subprocess.Popen[bytes]]":
    command = [sys.executable, "-m", "tests.support.asserting_gpu_engine", endpoint, str(model), str(step)]
    process = subprocess.Popen(command, cwd=Path(__file__).parents[3])
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.mark.gpu
@pytest.mark.timeout(900)
def test_an_assert_on_the_device_ends_the_engine_and_its_streams_go_on_in_the_next(tmp_path: Path) -> None:
    model = make_model(tmp_path)
    with free_endpoint() as endpoint:
        with running(endpoint, model, 0), WireGateway(endpoint) as gateway:
            gateway.wait_for(Ready, START_LIMIT_S)
            gateway.send(submission(1, PROMPT, NUM_TOKENS))
            expected = gateway.wait_end(1).tokens[0]
        with running(endpoint, model, 12) as process, WireGateway(endpoint) as gateway:
            gateway.wait_for(Ready, START_LIMIT_S)
            gateway.send(submission(1, PROMPT, NUM_TOKENS))
            until_s = time.monotonic() + END_LIMIT_S
            while process.poll() is None:
                assert time.monotonic() < until_s, "the engine lives on with a device that is lost"
                gateway.pump()
            while gateway.pump():
                pass
            first = gateway.requests[1].tokens[0]
            assert process.returncode == EXIT_FAULT
            assert 0 < len(first) < 13 and first == expected[: len(first)] and not gateway.requests[1].finished
        with running(endpoint, model, 0), WireGateway(endpoint) as gateway:
            ready = gateway.wait_for(Ready, START_LIMIT_S)
            assert ready.suspects == [submission(1, PROMPT).stream_id]
            gateway.send(submission(1, PROMPT, NUM_TOKENS, prior_token_ids=[pack_ids(first)]))
            assert first + gateway.wait_end(1).tokens[0] == expected
