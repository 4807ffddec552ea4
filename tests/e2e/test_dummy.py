"""A model's shape without its weights, served: every token counts and comes as an event, text or none."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import aiohttp
import pytest

from tests.support.served import Served, free_port, wait_ready
from tests.support.small_tokenizers import train_byte_level, write_folder

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    # Far more than the tokenizer has words, so that most of the tokens have no text.
    "vocab_size": 20_000,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "dtype": "float32",
}
NUM_TOKENS = 24


@contextmanager
def serving(model: Path, folder: Path) -> Iterator[Served]:
    """A server of the model's dummy; its log goes to `folder`."""
    port, log = free_port(), folder / "log"
    command = [sys.executable, "-m", "streamkv", "serve", f"--port={port}", f"--model={model}", "--load-format=dummy"]
    with log.open("wb") as out:
        process = subprocess.Popen([*command, "--kv-cache-memory-gib=0.05"], stdout=out, stderr=subprocess.STDOUT)
    served = Served(process, f"http://127.0.0.1:{port}", log)
    try:
        wait_ready(served)
        yield served
    finally:
        process.kill()
        process.wait()


@pytest.mark.long
@pytest.mark.parametrize("model_type", ["llama", "gpt_neox"])
async def test_tokens_of_a_dummy_are_streamed_and_counted_one_by_one(model_type: str, tmp_path: Path) -> None:
    folder = tmp_path / "dummy"
    write_folder(folder, train_byte_level())
    architecture = {"llama": "LlamaForCausalLM", "gpt_neox": "GPTNeoXForCausalLM"}[model_type]
    config = {**CONFIG, "model_type": model_type, "architectures": [architecture]}
    if model_type == "gpt_neox":
        del config["num_key_value_heads"]
    (folder / "config.json").write_text(json.dumps(config))
    body = {"prompt": [5, 300, 7], "max_tokens": NUM_TOKENS, "ignore_eos": True, "temperature": 1.0, "seed": 3}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    with serving(folder, tmp_path) as served:
        async with (
            aiohttp.ClientSession() as session,
            session.post(served.url + "/v1/completions", json=body) as response,
        ):
            assert response.status == 200, await response.text()
            lines = (await response.read()).decode().splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    choices = [choice for event in events for choice in event["choices"]]
    assert [choice["finish_reason"] for choice in choices] == [None] * NUM_TOKENS + ["length"]
    assert sum(choice["text"] == "" for choice in choices) > NUM_TOKENS / 2
    usage = events[-1]["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (3, NUM_TOKENS)
