"""The settings of both processes, and where their values come from.

Every field is a setting, declared once: its default, its group and words for help, its range. Its flag is
--field-name, its variable STREAMKV_FIELD_NAME, its key in the TOML file field_name. Precedence: flag, variable,
file, default. The file is named by --config or STREAMKV_CONFIG; keys at its top hold for both processes, those in
[engine] and [gateway] for one of them.
"""

import re
import sys
from collections.abc import Mapping, Sequence
from typing import Annotated, Final, Literal, NoReturn, TypeVar

import msgspec

from streamkv.errors import ConfigError
from streamkv.settings import Kind, Rule, Value, check, choose, settings

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Device = Literal["auto", "cpu", "cuda"]
LoadFormat = Literal["auto", "dummy"]
Quantization = Literal["none", "fp8"]
KvCacheDtype = Literal["auto", "fp8"]
PreemptionMode = Literal["auto", "recompute", "swap"]
ToolCallParser = Literal["auto", "hermes", "llama3", "mistral", "none"]
ReasoningParser = Literal["auto", "think", "none"]
LogLevel = Literal["debug", "info", "warning", "error"]
AccessLogForm = Literal["off", "text", "json"]

MODEL, WIRE, MEMORY, SCHEDULING, HTTP, ACCESS, STREAMS, OTHER = (
    "Model",
    "Between gateway and engine",
    "KV memory",
    "Scheduling",
    "HTTP server",
    "Who may use it",
    "Streams and time limits",
    "Other",
)
MIB: Final = 1024 * 1024
_ORIGIN: Final = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^/?#@*\s]+")


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the engine process. What is measured at start (blocks that fit) is in executor.DeviceLimits.

    Raises ConfigError on construction, as GatewayConfig does.
    """

    model: Annotated[
        str,
        Rule(
            MODEL,
            "local folder (safetensors), .gguf file or Hugging Face id; default: the built-in SmolLM2-135M-Instruct",
        ),
    ] = "default"
    served_model_name: Annotated[str, Rule(MODEL, "name that clients see; empty: taken from the model")] = ""
    device: Annotated[
        Device, Rule(MODEL, "where the model runs; auto: on the NVIDIA GPU, or on the CPU where there is none")
    ] = "auto"
    dtype: Annotated[Dtype, Rule(MODEL, "type of weights and activations")] = "auto"
    load_format: Annotated[
        LoadFormat, Rule(MODEL, "dummy: random weights instead of the model's, of which only config.json is read")
    ] = "auto"
    quantization: Annotated[
        Quantization, Rule(MODEL, "fp8: hold the weights of linear layers as 8-bit floats; GPU only")
    ] = "none"
    deterministic: Annotated[
        bool,
        Rule(MODEL, "the same bits for a sequence whatever runs beside it, at the cost of some speed; GPU only"),
    ] = False
    enforce_eager: Annotated[bool, Rule(MODEL, "launch every kernel by itself instead of CUDA graphs; GPU only")] = (
        False
    )
    threads: Annotated[int, Rule(MODEL, "CPU threads for the model; 0: one per core", ge=0, le=1024)] = 0
    max_model_len: Annotated[
        int,
        Rule(
            MODEL,
            "most tokens of one sequence, prompt and answer; 0: from the model, less if memory says so",
            ge=0,
            le=16_777_216,
        ),
    ] = 0
    kv_cache_memory_gib: Annotated[
        float, Rule(MEMORY, "KV memory on a CPU, GiB; float32 in every dtype", gt=0, le=4096)
    ] = 1.0
    gpu_memory_utilization: Annotated[
        float, Rule(MEMORY, "share of the GPU's memory that the engine takes, weights and all", gt=0, le=1)
    ] = 0.9
    kv_cache_dtype: Annotated[
        KvCacheDtype, Rule(MEMORY, "type of cached keys and values; fp8: 8-bit floats, half the memory; GPU only")
    ] = "auto"
    block_size: Annotated[int, Rule(MEMORY, "tokens per KV block", ge=1, le=256)] = 16
    max_num_seqs: Annotated[int, Rule(SCHEDULING, "sequences that run at once", ge=1, le=65536)] = 256
    max_num_batched_tokens: Annotated[
        int, Rule(SCHEDULING, "tokens of one step; 0: chosen for the device", ge=0, le=1_048_576)
    ] = 0
    max_prefill_tokens: Annotated[
        int,
        Rule(SCHEDULING, "largest chunk of one prompt in a step; 0: as max_num_batched_tokens", ge=0, le=1_048_576),
    ] = 0
    max_num_partial_prefills: Annotated[
        int, Rule(SCHEDULING, "prompts that are computed in part at once", ge=1, le=65536)
    ] = 4
    enable_chunked_prefill: Annotated[bool, Rule(SCHEDULING, "split long prompts over steps")] = True
    max_queue: Annotated[
        int, Rule(SCHEDULING, "requests that may wait; beyond it new ones are refused with 503", ge=1, le=1_000_000)
    ] = 1024
    endpoint: Annotated[
        str, Rule(WIRE, "ZeroMQ address of the engine; empty: an ipc socket in a folder of this user")
    ] = ""
    curve_secret_key_file: Annotated[
        str,
        Rule(
            WIRE,
            "file with this side's CURVE secret key, made by `streamkv keygen FILE`; needed for tcp beyond loopback",
        ),
    ] = ""
    heartbeat_s: Annotated[float, Rule(WIRE, "seconds between heartbeats", gt=0, le=60)] = 1.0
    gateway_timeout_s: Annotated[float, Rule(WIRE, "a gateway silent for this long is gone", gt=0, le=3600)] = 15.0
    max_unacked_bytes: Annotated[
        int,
        Rule(WIRE, "output that one gateway may leave unacknowledged before its sequences pause", ge=4096, le=2**40),
    ] = 8 * MIB
    max_attach_grace_s: Annotated[
        float, Rule(STREAMS, "longest grace period of a re-attachable stream", ge=0, le=86400)
    ] = 300.0
    log_level: Annotated[LogLevel, Rule(OTHER, "least severe line that is logged")] = "info"
    enable_prefix_caching: Annotated[
        bool, Rule(MEMORY, "keep computed blocks and share them with requests that begin alike")
    ] = True

    host_kv_memory_gib: Annotated[
        float, Rule(MEMORY, "host memory for KV blocks that leave the device, GiB; 0: none", ge=0, le=65536)
    ] = 0.0
    disk_kv_path: Annotated[
        str, Rule(MEMORY, "folder for KV blocks that leave host memory; kept over restarts; empty: none")
    ] = ""
    disk_kv_size_gib: Annotated[float, Rule(MEMORY, "most that disk_kv_path may hold, GiB", gt=0, le=1_048_576)] = 16.0
    preemption_mode: Annotated[
        PreemptionMode,
        Rule(
            MEMORY, "how a sequence that lost its blocks comes back: computed again, from host memory, or the cheaper"
        ),
    ] = "auto"
    itl_target_ms: Annotated[
        float,
        Rule(
            SCHEDULING,
            "gap between the tokens of running streams that prompts beside them may not exceed, ms; 0: none",
            ge=0,
            le=600_000,
        ),
    ] = 0.0
    ageing_s: Annotated[
        float, Rule(SCHEDULING, "a waiting request rises by one priority after each of these", gt=0, le=86400)
    ] = 30.0

    def __post_init__(self) -> None:
        check(self)
        if self.disk_kv_path and not self.host_kv_memory_gib:
            raise ConfigError(
                "disk_kv_path", "needs host_kv_memory_gib over 0: blocks go to disk by way of host memory"
            )
        if self.host_kv_memory_gib and not self.enable_prefix_caching:
            raise ConfigError(
                "host_kv_memory_gib", "needs enable_prefix_caching: blocks are found again by their tokens"
            )
        if self.preemption_mode == "swap" and not self.host_kv_memory_gib:
            raise ConfigError("preemption_mode", "swap needs host_kv_memory_gib over 0")
        if self.itl_target_ms and not self.enable_chunked_prefill:
            raise ConfigError("itl_target_ms", "needs enable_chunked_prefill: a whole prompt takes as long as it takes")


class GatewayConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the gateway process."""

    model: Annotated[str, Rule(MODEL, "as the engine's: the gateway takes the tokenizer from it")] = "default"
    served_model_name: Annotated[str, Rule(MODEL, "name that clients see; empty: taken from the model")] = ""
    chat_template: Annotated[str, Rule(MODEL, "file with a Jinja chat template instead of the model's")] = ""
    tool_call_parser: Annotated[
        ToolCallParser,
        Rule(
            MODEL,
            "how the model writes calls of functions; auto: as its chat template and special tokens say, none: calls "
            "are not looked for",
        ),
    ] = "auto"
    reasoning_parser: Annotated[
        ReasoningParser,
        Rule(
            MODEL,
            "how the model marks what it thinks before it answers; think: <think>…</think>, auto: as its chat template "
            "and tokens say, none: it is part of the answer",
        ),
    ] = "auto"
    host: Annotated[str, Rule(HTTP, "address to listen on; 0.0.0.0: all")] = "127.0.0.1"
    port: Annotated[int, Rule(HTTP, "port to listen on; 0: any free one", ge=0, le=65535)] = 8000
    gateway_workers: Annotated[
        int, Rule(HTTP, "gateway processes that share the port and the engine, for more than one core", ge=1, le=64)
    ] = 1
    max_body_bytes: Annotated[int, Rule(HTTP, "largest request body", ge=1024, le=2**31 - 1)] = 8 * MIB
    startup_wait_s: Annotated[
        float, Rule(STREAMS, "how long a request waits for the engine to be ready before 503", ge=0, le=86400)
    ] = 30.0
    request_timeout_s: Annotated[float, Rule(STREAMS, "a request that takes longer is aborted", gt=0, le=86400)] = 600.0
    keepalive_s: Annotated[
        float, Rule(STREAMS, "a comment goes out on a stream that was silent for this long", gt=0, le=3600)
    ] = 10.0
    keepalive_timeout_s: Annotated[
        float,
        Rule(STREAMS, "a client whose connection answers nothing for this long, though asked, is gone", ge=1, le=3600),
    ] = 60.0
    max_stream_buffer_bytes: Annotated[
        int, Rule(STREAMS, "unread output of one stream before its sequences pause", ge=1024, le=2**31 - 1)
    ] = 256 * 1024
    shutdown_grace_s: Annotated[
        float, Rule(STREAMS, "how long live streams may go on after SIGTERM", ge=0, le=3600)
    ] = 30.0
    endpoint: Annotated[
        str, Rule(WIRE, "ZeroMQ address of the engine; empty: an ipc socket in a folder of this user")
    ] = ""
    curve_secret_key_file: Annotated[
        str, Rule(WIRE, "file with this side's CURVE secret key, made by `streamkv keygen FILE`")
    ] = ""
    curve_server_key: Annotated[str, Rule(WIRE, "the engine's public CURVE key (40 characters)")] = ""
    heartbeat_s: Annotated[float, Rule(WIRE, "seconds between heartbeats", gt=0, le=60)] = 1.0
    engine_timeout_s: Annotated[float, Rule(WIRE, "an engine silent for this long is lost", gt=0, le=3600)] = 15.0
    log_level: Annotated[LogLevel, Rule(OTHER, "least severe line that is logged")] = "info"
    api_keys_file: Annotated[
        str, Rule(ACCESS, 'TOML file with the API keys that are let in, a line each: name = "key"; empty: no such file')
    ] = ""
    share_prefix_cache: Annotated[
        bool,
        Rule(ACCESS, "let API keys whose entry says nothing else share cached prompts; off: each key has its own"),
    ] = False
    allowed_origins: Annotated[
        str,
        Rule(
            ACCESS,
            "other origins whose web pages may use this server, as https://example.org, with spaces between; *: all",
        ),
    ] = ""
    requests_per_minute: Annotated[
        int,
        Rule(
            ACCESS, "requests per minute of each API key whose entry says nothing else; 0: no limit", ge=0, le=2**31 - 1
        ),
    ] = 0
    tokens_per_minute: Annotated[
        int,
        Rule(ACCESS, "the same for tokens, of prompts and answers together; 0: no limit", ge=0, le=2**31 - 1),
    ] = 0
    max_concurrent: Annotated[
        int,
        Rule(ACCESS, "requests at once of each API key whose entry says nothing else; 0: no limit", ge=0, le=2**31 - 1),
    ] = 0
    access_log: Annotated[
        AccessLogForm,
        Rule(OTHER, "a line for each request: none, as text among the log lines on stderr, or as JSON on stdout"),
    ] = "off"
    tracing: Annotated[
        bool, Rule(OTHER, "send OpenTelemetry traces; also on when OTEL_EXPORTER_OTLP_ENDPOINT is set")
    ] = False

    def __post_init__(self) -> None:
        check(self)
        for origin in self.origins:
            if not _ORIGIN.fullmatch(origin):
                raise ConfigError(
                    "allowed_origins",
                    f"must have origins as https://example.org or http://localhost:3000, null or *, got {origin!r}",
                )

    @property
    def origins(self) -> frozenset[str]:
        """allowed_origins, each one, in lower case."""
        return frozenset(self.allowed_origins.lower().replace(",", " ").split())


T = TypeVar("T", EngineConfig, GatewayConfig)
PROCESSES: Final[Mapping[str, Kind]] = {"engine": EngineConfig, "gateway": GatewayConfig}


def load(kind: type[T], argv: Sequence[str], environ: Mapping[str, str]) -> T:
    """One process's settings from its flags (without the program's name), the environment and the TOML file.

    Prints help and raises SystemExit(0) for --help. Raises ConfigError, whose field is the key as it was written.
    """
    (chosen,) = choose((kind,), PROCESSES, argv, environ)
    return _make(kind, chosen)


def load_both(argv: Sequence[str], environ: Mapping[str, str]) -> tuple[EngineConfig, GatewayConfig]:
    """As load, for `streamkv serve`: flags of either process; what both know goes to both."""
    engine, gateway = choose((EngineConfig, GatewayConfig), PROCESSES, argv, environ)
    return _make(EngineConfig, engine), _make(GatewayConfig, gateway)


def _make(kind: type[T], chosen: Mapping[str, Value]) -> T:
    """Raises ConfigError for a rule between fields, which msgspec would wrap in an error of its own."""
    try:
        return msgspec.convert(chosen, kind)
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, ConfigError):
            raise error.__cause__ from None
        raise


def to_argv(config: EngineConfig | GatewayConfig) -> list[str]:
    """The flags that give exactly this config to another process, whatever its environment and file say."""
    values = msgspec.structs.asdict(config)
    return [setting.as_flag(values[name]) for name, setting in settings(type(config)).items()]


def exit_with(error: ConfigError) -> NoReturn:
    """End the program as a wrong setting should: one line, exit status 2."""
    print(f"streamkv: {error}", file=sys.stderr)
    raise SystemExit(2)
