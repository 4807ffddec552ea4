"""What can be set, its default and its range: by flag, STREAMKV_ variable or TOML file.

Every field of the two structs is a setting. Its flag is --field-name, its variable STREAMKV_FIELD_NAME, its key
in the file field_name. Precedence: flag, variable, file, default.
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

Dtype = Literal["auto", "float32", "bfloat16", "float16"]


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the engine process. What is measured at start (blocks that fit) is in executor.DeviceLimits."""

    model: Annotated[
        str,
        Meta(
            description="local folder (safetensors), .gguf file or Hugging Face id; 'default' is the built-in SmolLM2-135M-Instruct"
        ),
    ] = "default"
    served_model_name: Annotated[str, Meta(description="name that clients see; empty: taken from the model")] = ""
    endpoint: Annotated[
        str, Meta(description="ZeroMQ address of the engine; empty: an ipc socket in a folder of this user")
    ] = ""
    curve_secret_key_file: Annotated[
        str, Meta(description="file with this side's CURVE secret key; needed for tcp beyond loopback")
    ] = ""
    device: Annotated[Literal["auto", "cpu"], Meta(description="where the model runs")] = "auto"
    dtype: Annotated[Dtype, Meta(description="type of weights and activations")] = "auto"
    threads: Annotated[int, Meta(ge=0, le=1024, description="CPU threads for the model; 0: one per core")] = 0
    block_size: Annotated[int, Meta(ge=1, le=256, description="tokens per KV block")] = 16
    kv_cache_memory_gib: Annotated[float, Meta(gt=0, le=4096, description="KV memory on a CPU, GiB")] = 1.0
    max_model_len: Annotated[
        int,
        Meta(ge=0, le=16_777_216, description="most tokens of one sequence; 0: from the model, less if memory says so"),
    ] = 0
    max_num_seqs: Annotated[int, Meta(ge=1, le=65536, description="sequences that run at once")] = 256
    max_num_batched_tokens: Annotated[
        int, Meta(ge=0, le=1_048_576, description="tokens of one step; 0: chosen for the device")
    ] = 0
    max_prefill_tokens: Annotated[
        int, Meta(ge=0, le=1_048_576, description="largest chunk of one prompt in a step; 0: max_num_batched_tokens")
    ] = 0
    max_num_partial_prefills: Annotated[
        int, Meta(ge=1, le=65536, description="prompts that are computed in part at once")
    ] = 4
    enable_chunked_prefill: Annotated[bool, Meta(description="split long prompts over steps")] = True
    max_queue: Annotated[
        int, Meta(ge=1, le=1_000_000, description="requests that may wait; beyond it new ones are refused with 503")
    ] = 1024
    gateway_timeout_s: Annotated[float, Meta(gt=0, le=3600, description="a gateway silent for this long is gone")] = (
        15.0
    )
    heartbeat_s: Annotated[float, Meta(gt=0, le=60, description="seconds between heartbeats")] = 1.0
    max_unacked_bytes: Annotated[
        int,
        Meta(
            ge=4096, le=2**40, description="output that one gateway may leave unacknowledged before its sequences pause"
        ),
    ] = 8 * 1024 * 1024
    max_attach_grace_s: Annotated[
        float, Meta(ge=0, le=86400, description="longest grace period of a re-attachable stream")
    ] = 300.0
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], Meta(description="least severe line that is logged")
    ] = "info"


class GatewayConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the gateway process."""

    model: Annotated[str, Meta(description="as the engine's: the gateway takes the tokenizer from it")] = "default"
    served_model_name: Annotated[str, Meta(description="name that clients see; empty: taken from the model")] = ""
    endpoint: Annotated[
        str, Meta(description="ZeroMQ address of the engine; empty: an ipc socket in a folder of this user")
    ] = ""
    curve_secret_key_file: Annotated[str, Meta(description="file with this side's CURVE secret key")] = ""
    curve_server_key: Annotated[str, Meta(description="the engine's public CURVE key (40 characters)")] = ""
    host: Annotated[str, Meta(description="address to listen on")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535, description="port to listen on; 0: any free one")] = 8000
    chat_template: Annotated[str, Meta(description="file with a Jinja chat template instead of the model's")] = ""
    startup_wait_s: Annotated[
        float, Meta(ge=0, le=86400, description="how long a request waits for the engine to be ready before 503")
    ] = 30.0
    request_timeout_s: Annotated[float, Meta(gt=0, le=86400, description="a request that takes longer is aborted")] = (
        600.0
    )
    max_body_bytes: Annotated[int, Meta(ge=1024, le=2**31 - 1, description="largest request body")] = 8 * 1024 * 1024
    max_stream_buffer_bytes: Annotated[
        int, Meta(ge=1024, le=2**31 - 1, description="unread output of one stream before its sequences pause")
    ] = 256 * 1024
    keepalive_s: Annotated[
        float, Meta(gt=0, le=3600, description="a comment goes out on a stream that was silent for this long")
    ] = 10.0
    heartbeat_s: Annotated[float, Meta(gt=0, le=60, description="seconds between heartbeats to the engine")] = 1.0
    engine_timeout_s: Annotated[float, Meta(gt=0, le=3600, description="an engine silent for this long is lost")] = 15.0
    shutdown_grace_s: Annotated[
        float, Meta(ge=0, le=3600, description="how long live streams may go on after SIGTERM")
    ] = 30.0
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], Meta(description="least severe line that is logged")
    ] = "info"
