"""Writes docs/operations.md, with the table of metrics from their declarations: python -m docs.operations"""

from pathlib import Path

from gateway.metrics import HELP, kind_of

HEAD = """\
# Watching and limiting a server

Written by `python -m docs.operations`; a test keeps it current. How each setting is given is in
[configuration.md](configuration.md), keys and limits in full under [API keys](configuration.md#api-keys) and
[Limits](configuration.md#limits) there.

## Keys and limits

```toml
# keys.toml, chmod 600; read again within two seconds of a change
alice = "2f6c…"                # as the settings say

[keys.batch]
key = "91d0…"
requests_per_minute = 60
tokens_per_minute = 200_000
max_concurrent = 8
```

```sh
streamkv serve --api-keys-file keys.toml --max-concurrent 32   # 32 at once for alice, 8 for batch
```

| what happens | answer |
| --- | --- |
| a key's budget of requests or tokens is used up | 429, `Retry-After`: when it holds enough again |
| as many of a key's requests run as may at once | 429, `Retry-After: 1` |
| the engine's queue (`--max-queue`) is full | 503, `Retry-After`: when the queue will have drained, as predicted |
| the engine starts, or is gone, for longer than `--startup-wait-s` | 503 |
| the server shuts down | 503 |

To take a key away, delete its line: its live streams go on, everything new is 401. To replace one, change the key and
leave the name, which keeps its cached prompts, its figures and what is left of its budgets.

With `--gateway-workers` the limits hold for all workers together. Two servers in front of one engine, each started on
its own, have budgets of their own.

## Ending, and a new engine

`SIGTERM`, `SIGINT` or `SIGHUP` ends a server: `/ready` says 503, new work is refused, live streams go on for
`--shutdown-grace-s`; then the rest end with `abort`, and those that can be attached to break off, for their clients to
take up elsewhere. A second signal ends it now. The exit status is 0 only for an end that was asked for.

`SIGUSR1` gives a server a new engine without ending a stream, for new weights in the model's folder, another driver, or
memory that is to be free for a moment. It goes to `streamkv serve`, with any number of gateway workers, or to
`streamkv engine --supervise`, which is the first process of the engine's container:

```sh
kill -USR1 PID
docker compose exec engine python3 -c "import os, signal; os.kill(1, signal.SIGUSR1)"
```

(not by `docker kill`, whatever the signal: Docker then counts the container as stopped by hand).

The engine finishes the steps that are on their way, writes its cache to disk where there is `--disk-kv-path` (for four
seconds at most), and ends; a new one is started at once. Gateways send it every live stream, which goes on where it
was, warm where the disk had it: clients see a pause and keep-alives. New requests wait for it, and are refused by 503
after `--startup-wait-s`. It counts in `streamkv_engine_restarts_total`, but not as a crash: there is no back-off. An
engine that takes over 10 s to make room (45 s under `--supervise`) is killed, which costs the cache and no stream. A
stream that nobody but the engine has ends with it, however that ends: one whose gateway is gone, and whose client has
not come to another yet.

## Request ids

A request's `X-Request-Id` (1 to 128 letters, digits and `._:/=+@-`) is kept, anything else is replaced by a random one.
It is in the answer's `x-request-id`, whatever the answer is, in the access log, in the log lines of gateway and engine,
and in the traces. A generation of a WebSocket has one of its own, the message's `request_id` or a random one, which its
`started` event tells.

## Logs

Log lines go to stderr as `key=value`, from `--log-level` on. The access log has one line for each request when it is
over, and is switched on by `--access-log json` (to stdout) or `--access-log text` (among the log lines):

```json
{"time":"2026-05-04T09:30:12.345Z","request_id":"4f1c…","method":"POST","path":"/v1/chat/completions","status":200,
 "bytes":5321,"seconds":2.318,"ttft":0.091,"prompt_tokens":412,"output_tokens":180,"cached_tokens":400,"key":"alice",
 "finish_reason":"stop","error":null}
```

(one line, wrapped here). `path` is the route, as `/v1/models/{name}`, so that nothing that a client wrote is in it, and
empty for a path that does not exist; queries are left out. `bytes` is the body as it went out. `status` 499 is a client
that went before its answer was whole. `method` `WS` is one generation of a WebSocket, which has no status. With several
choices `finish_reason` has each reason once. Prompts, answers and keys are in no line. `/health`, `/ready` and
`/metrics` are logged only when they fail.

## Traces

With the extra packages of `pip install 'streamkv[tracing]'`, `OTEL_EXPORTER_OTLP_ENDPOINT` or `--tracing` switches
OpenTelemetry traces on. They go out by OTLP over HTTP, from a thread of their own; the library's own variables
(`OTEL_SERVICE_NAME`, `OTEL_TRACES_SAMPLER`, `OTEL_EXPORTER_OTLP_HEADERS` …) hold. A request is a span, with a span
inside for each generation, whose attributes are those of the conventions for generative AI: model, operation, sampling
options, tokens read, made and found in the cache, finish reasons, time to the first token. No text is in them. A
caller's `traceparent` makes them part of its trace.

## Metrics

`/metrics` is Prometheus text; where the server has API keys it needs one of them, and shows the usage of all. Give
Prometheus a key of its own. `docker/prometheus/prometheus.yml` scrapes a gateway,
`docker/grafana/dashboards/streamkv.json` is a dashboard over what is below, and with `docker/grafana/provisioning`
Grafana loads both by itself.

Worth an alert: `streamkv_engine_ready` 0; `streamkv_seconds_since_last_step` over ten; a rate of
`streamkv_gateway_shed_total` that lasts; `streamkv_engine_restarts_total` that grows;
`streamkv_gateway_loop_lag_seconds` over a tenth.

Figures of the engine are missing while it is away. Every name begins with `streamkv_`.

| name | kind | what it is |
| --- | --- | --- |
"""


def page() -> str:
    """The page's text."""
    return HEAD + "".join(f"| `{name}` | {kind_of(name)} | {_cell(HELP[name])} |\n" for name in sorted(HELP))


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    Path(__file__).with_suffix(".md").write_text(page(), encoding="utf-8")
