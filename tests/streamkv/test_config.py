"""Settings: where a value comes from, and what is said about a wrong one."""

import typing
from pathlib import Path

import msgspec
import pytest

from streamkv.config import PROCESSES, EngineConfig, GatewayConfig, load, load_both, to_argv
from streamkv.errors import ConfigError
from streamkv.settings import merged, settings

ROOT = Path(__file__).resolve().parents[2]


def toml(folder: Path, text: str) -> str:
    path = folder / "streamkv.toml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def complaint(
    argv: list[str],
    environ: dict[str, str] | None = None,
    kind: type[EngineConfig] | type[GatewayConfig] = EngineConfig,
) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load(kind, argv, environ or {})
    return caught.value


def test_nothing_given_is_the_defaults() -> None:
    assert load(EngineConfig, [], {}) == EngineConfig()
    assert load(GatewayConfig, [], {"PATH": "/bin"}) == GatewayConfig()


def test_flag_wins_over_variable_over_file_over_default(tmp_path: Path) -> None:
    environ = {"STREAMKV_CONFIG": toml(tmp_path, "block_size = 2\nmax_num_seqs = 2\nmax_queue = 2")}
    environ |= {"STREAMKV_BLOCK_SIZE": "3", "STREAMKV_MAX_NUM_SEQS": "3"}
    config = load(EngineConfig, ["--block-size", "4"], environ)
    assert (config.block_size, config.max_num_seqs, config.max_queue) == (4, 3, 2)
    assert config.max_num_partial_prefills == EngineConfig().max_num_partial_prefills


def test_config_flag_wins_over_its_variable(tmp_path: Path) -> None:
    environ = {"STREAMKV_CONFIG": "/nowhere.toml"}
    assert load(EngineConfig, [f"--config={toml(tmp_path, 'block_size = 2')}"], environ).block_size == 2


@pytest.mark.parametrize(
    ("words", "value"),
    [
        (["--enable-chunked-prefill"], True),
        (["--no-enable-chunked-prefill"], False),
        (["--enable-chunked-prefill=off"], False),
        (["--no-enable-chunked-prefill", "--enable-chunked-prefill"], True),
    ],
)
def test_booleans_by_flag(words: list[str], value: bool) -> None:
    assert load(EngineConfig, words, {"STREAMKV_ENABLE_CHUNKED_PREFILL": str(not value)}) == EngineConfig(
        enable_chunked_prefill=value
    )


def test_a_value_may_begin_with_a_dash_only_after_an_equals_sign() -> None:
    assert load(EngineConfig, ["--model=--odd"], {}).model == "--odd"
    assert complaint(["--model", "--block-size", "4"]).field == "--model"


def test_the_last_of_a_repeated_flag_counts() -> None:
    assert load(GatewayConfig, ["--port", "1", "--port=2"], {}).port == 2


def test_empty_variables_count_as_not_set() -> None:
    assert load(GatewayConfig, [], {"STREAMKV_PORT": "", "STREAMKV_MODEL": ""}) == GatewayConfig()


def test_tables_of_the_file_win_over_its_top(tmp_path: Path) -> None:
    path = toml(tmp_path, 'model = "m"\nheartbeat_s = 2\n[engine]\nheartbeat_s = 3.5\n[gateway]\nport = 9000')
    engine, gateway = load_both(["--config", path], {})
    assert engine == EngineConfig(model="m", heartbeat_s=3.5)
    assert gateway == GatewayConfig(model="m", heartbeat_s=2.0, port=9000)


def test_serve_gives_shared_flags_to_both_and_the_others_to_their_own() -> None:
    engine, gateway = load_both(["--model", "m", "--port", "1", "--block-size", "8"], {"STREAMKV_DTYPE": "float32"})
    assert engine == EngineConfig(model="m", block_size=8, dtype="float32")
    assert gateway == GatewayConfig(model="m", port=1)


@pytest.mark.parametrize(
    ("argv", "environ", "field", "says"),
    [
        (["--block-size", "0"], {}, "--block-size", "must be a whole number from 1 to 256, got 0"),
        (["--block-size", "many"], {}, "--block-size", "got 'many'"),
        (["--block-size", "1.5"], {}, "--block-size", "a whole number"),
        (["--block-size"], {}, "--block-size", "needs a value: a whole number from 1 to 256"),
        (["--heartbeat-s=nan"], {}, "--heartbeat-s", "a number over 0 and at most 60"),
        (["--heartbeat-s=0"], {}, "--heartbeat-s", "over 0"),
        (["--kv-cache-memory-gib=inf"], {}, "--kv-cache-memory-gib", "at most 4096"),
        (
            ["--dtype", "bfloat61"],
            {},
            "--dtype",
            "one of auto, float32, bfloat16, float16, got 'bfloat61'; did you mean",
        ),
        (["--enable-chunked-prefill=maybe"], {}, "--enable-chunked-prefill", "must be true or false"),
        (["--blocksize", "4"], {}, "--blocksize", "did you mean --block-size"),
        (["--block_size", "4"], {}, "--block_size", "did you mean --block-size"),
        (["--port", "1"], {}, "--port", "is a setting of the gateway"),
        (["block"], {}, "'block'", "is no flag"),
        ([], {"STREAMKV_BLOCK_SIZE": "257"}, "STREAMKV_BLOCK_SIZE", "from 1 to 256, got 257"),
        ([], {"STREAMKV_BLOK_SIZE": "1"}, "STREAMKV_BLOK_SIZE", "did you mean STREAMKV_BLOCK_SIZE"),
    ],
)
def test_a_wrong_setting_is_named_as_it_was_written(
    argv: list[str], environ: dict[str, str], field: str, says: str
) -> None:
    error = complaint(argv, environ)
    assert error.field == field and says in error.message


@pytest.mark.parametrize(
    ("text", "field", "says"),
    [
        ("block_size = 0", "block_size", "from 1 to 256, got 0 (in "),
        ("[engine]\nblock_size = '8'", "engine.block_size", "a whole number from 1 to 256, got '8' (in "),
        ("block_size = true", "block_size", "a whole number"),
        ("block_size = 8.0", "block_size", "a whole number"),
        ("enable_chunked_prefill = 1", "enable_chunked_prefill", "true or false"),
        ("model = 5", "model", "must be text, got 5"),
        ("heartbeat_s = nan", "heartbeat_s", "a number over 0"),
        ("block-size = 8", "block-size", "did you mean block_size"),
        ("[gateway]\nblock_size = 8", "gateway.block_size", "no such setting"),
        ("[gatewya]\nport = 8", "gatewya", "did you mean gateway"),
        ("engine = 5", "engine", "must be a table"),
        ("block_size = ", "--config", "not valid TOML"),
    ],
)
def test_a_wrong_key_of_the_file_is_named_with_the_file(tmp_path: Path, text: str, field: str, says: str) -> None:
    path = toml(tmp_path, text)
    error = complaint(["--config", path])
    assert error.field == field and says in error.message and path in error.message


def test_a_missing_or_binary_file_is_said(tmp_path: Path) -> None:
    assert "cannot read" in complaint(["--config", str(tmp_path / "none.toml")]).message
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    assert "not valid TOML" in complaint(["--config", str(tmp_path / "binary.toml")]).message


def test_strange_variables_are_let_be() -> None:
    """Kubernetes adds such ones for a service called streamkv."""
    environ = {"STREAMKV_SERVICE_HOST": "10.0.0.1", "STREAMKV_PORT_8000_TCP_ADDR": "10.0.0.1", "STREAMKV_CACHE": "/c"}
    assert load(EngineConfig, [], environ) == EngineConfig()


def test_a_struct_that_breaks_a_rule_cannot_be_made() -> None:
    with pytest.raises(ConfigError, match="block_size: must be a whole number from 1 to 256, got 0"):
        EngineConfig(block_size=0)
    with pytest.raises(ConfigError, match="port"):
        GatewayConfig(port=70000)


def test_to_argv_gives_the_same_config_whatever_the_environment() -> None:
    engine = EngineConfig(model="a b", block_size=8, enable_chunked_prefill=False, kv_cache_memory_gib=0.1)
    environ = {"STREAMKV_BLOCK_SIZE": "32", "STREAMKV_MAX_QUEUE": "7", "STREAMKV_ENDPOINT": "ipc://x"}
    assert load(EngineConfig, to_argv(engine), environ) == engine
    assert load(GatewayConfig, to_argv(GatewayConfig(port=0)), environ) == GatewayConfig(port=0)


TEXTS = {"allowed_origins": "https://example.org"}
"""Of text with a rule of its own, one that keeps it."""
COMPANIONS = {"disk_kv_path": "host_kv_memory_gib", "preemption_mode": "host_kv_memory_gib"}
"""What must be 1 for a field's last value to keep the rules between fields."""


@pytest.mark.parametrize("kind", [EngineConfig, GatewayConfig])
def test_every_field_can_be_set_by_flag_variable_and_file(
    tmp_path: Path, kind: type[EngineConfig] | type[GatewayConfig]
) -> None:
    for name, setting in settings(kind).items():
        if setting.kind is bool:
            value: object = not setting.default
        elif setting.kind is str:
            value = setting.choices[-1] if setting.choices else TEXTS.get(name, "other")
        else:
            value = setting.rule.le
            assert value is not None, f"{name} has no upper bound"
        value = int(typing.cast(float, value)) if setting.kind is int else value
        literal = str(value).lower() if isinstance(value, bool) else repr(value)
        beside = [f"{settings(kind)[COMPANIONS[name]].flag}=1"] if name in COMPANIONS else []
        by_flag = load(kind, [f"{setting.flag}={value}", *beside], {})
        by_variable = load(kind, beside, {setting.variable: str(value)})
        by_file = load(kind, ["--config", toml(tmp_path, f"{name} = {literal}"), *beside], {})
        assert msgspec.structs.asdict(by_flag)[name] == value, name
        assert by_flag == by_variable == by_file != load(kind, beside, {})


@pytest.mark.parametrize(
    ("argv", "field", "says"),
    [
        (["--disk-kv-path", "kv"], "disk_kv_path", "needs host_kv_memory_gib over 0"),
        (["--host-kv-memory-gib=1", "--no-enable-prefix-caching"], "host_kv_memory_gib", "needs enable_prefix_caching"),
        (["--preemption-mode=swap"], "preemption_mode", "needs host_kv_memory_gib over 0"),
        (["--itl-target-ms=50", "--no-enable-chunked-prefill"], "itl_target_ms", "needs enable_chunked_prefill"),
    ],
)
def test_a_rule_between_fields_is_said_like_any_other(argv: list[str], field: str, says: str) -> None:
    error = complaint(argv)
    assert error.field == field and says in error.message
    with pytest.raises(ConfigError, match=field):
        load_both(argv, {})


@pytest.mark.parametrize(
    ("text", "origins"),
    [
        ("", set()),
        ("*", {"*"}),
        ("https://A.example, http://b:3000 null", {"https://a.example", "http://b:3000", "null"}),
        ("example.org", None),
        ("https://example.org/", None),
        ("https://example.org/path", None),
        ("https://*.example.org", None),
        ("https://user@example.org", None),
        ("https://", None),
    ],
)
def test_allowed_origins_are_origins(text: str, origins: set[str] | None) -> None:
    if origins is None:
        assert complaint([f"--allowed-origins={text}"], kind=GatewayConfig).field == "allowed_origins"
    else:
        assert load(GatewayConfig, [f"--allowed-origins={text}"], {}).origins == origins


def test_help_shows_every_setting_with_its_default_and_range(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        load_both(["--help"], {})
    shown = " ".join(capsys.readouterr().out.split())
    assert ended.value.code == 0
    for setting in merged(PROCESSES.values()).values():
        assert shown.count(f" {setting.flag} ") + shown.count(f" {setting.flag},") >= 1, setting.flag
        assert setting.rule.text.split(";")[0] in shown
    assert "tokens per KV block; a whole number from 1 to 256 (default: 16)" in shown


def test_shared_fields_have_one_default() -> None:
    engine, gateway = settings(EngineConfig), settings(GatewayConfig)
    for name in engine.keys() & gateway.keys():
        assert engine[name].default == gateway[name].default
        assert engine[name].kind is gateway[name].kind and engine[name].choices == gateway[name].choices


def test_the_settings_page_is_current() -> None:
    """Made by `python -m docs.configuration`."""
    from docs.configuration import page

    assert (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8") == page()
