"""What operators and load balancers ask: alive, ready, figures; and which models there are."""

import time
from datetime import UTC, datetime
from typing import Final

from aiohttp import web

from gateway import keys
from gateway.admission import UnknownModel
from gateway.answers import json_bytes
from gateway.engine_client import EngineUnavailable
from gateway.figures import Figures
from gateway.metrics import CONTENT_TYPE, process_figures, render

STATS_TIMEOUT_S: Final = 2.0


def _json(fields: dict[str, object], status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(body=json_bytes(fields), status=status, content_type="application/json", headers=headers)


async def health(request: web.Request) -> web.Response:
    """Whether this process is alive. Waits for nothing."""
    return _json({"status": "ok"})


async def ready(request: web.Request) -> web.Response:
    """Whether the engine takes work: 200, or 503 with the stage of its start and how far that is,
    or with what is wrong."""
    engine, admission = request.app[keys.ENGINE], request.app[keys.ADMISSION]
    if admission.is_draining:
        return _json({"status": "draining", "stage": "shutting down", "percent": 0.0}, 503, {"Retry-After": "5"})
    if not engine.is_ready:
        fields: dict[str, object] = {
            "status": engine.state.name.lower(),
            "stage": engine.stage,
            "percent": round(engine.percent, 1),
        }
        return _json(fields, 503, {"Retry-After": "1"})
    if not request.app[keys.TOKENIZER].is_loaded:
        return _json(
            {"status": "loading", "stage": "loading the tokenizer", "percent": 99.0}, 503, {"Retry-After": "1"}
        )
    if misfit := request.app[keys.GENERATION].misfit:
        return _json({"status": "wrong_model", "stage": misfit, "percent": 0.0}, 503, {"Retry-After": "30"})
    return _json({"status": "ready", "stage": "ready", "percent": 100.0})


async def models(request: web.Request) -> web.Response:
    """A list of one, in OpenAI's shape and in Anthropic's at once."""
    await request.app[keys.ADMISSION].enter()
    found = _model(request)
    page: dict[str, object] = {"has_more": False, "first_id": found["id"], "last_id": found["id"]}
    return _json({"object": "list", "data": [found], **page})


async def model(request: web.Request) -> web.Response:
    """One model by its name, which may hold slashes."""
    await request.app[keys.ADMISSION].enter()
    name = request.match_info["name"]
    if name != request.app[keys.GENERATION].model_name:
        raise UnknownModel(name, request.app[keys.GENERATION].model_name)
    return _json(_model(request))


def _model(request: web.Request) -> dict[str, object]:
    facts = request.app[keys.ENGINE].ready
    if facts is None:
        raise EngineUnavailable("the engine is not ready")
    name, created = request.app[keys.GENERATION].model_name, int(request.app[keys.STARTED_AT])
    return {
        "id": name,
        "object": "model",
        "type": "model",
        "display_name": name,
        "created": created,
        "created_at": f"{datetime.fromtimestamp(created, UTC):%Y-%m-%dT%H:%M:%SZ}",
        "owned_by": "streamkv",
        "root": facts.model.name,
        "max_model_len": facts.model.max_model_len,
    }


async def metrics(request: web.Request) -> web.Response:
    """Prometheus text: the engine's figures, and the gateway's with those of its siblings."""
    app = request.app
    stats = await app[keys.ENGINE].stats(STATS_TIMEOUT_S)
    figures = own_figures(app)
    for packed in await app[keys.OTHER_FIGURES]():
        figures = figures.add(packed)
    body = render(
        figures.metrics,
        gauges=figures.gauges,
        counters=figures.counters,
        engine=stats,
        key_names=app[keys.API_KEYS].names,
        shed=figures.shed,
    )
    return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE})


def own_figures(app: web.Application) -> Figures:
    """Those of this process."""
    engine, generation = app[keys.ENGINE], app[keys.GENERATION]
    gauges, counters = process_figures()
    return Figures(
        app[keys.METRICS],
        gauges={
            **gauges,
            "gateway_live_streams": generation.num_live,
            "gateway_waiting_for_engine": app[keys.ADMISSION].num_waiting,
            "gateway_websockets": len(app[keys.SOCKETS].live),
            "gateway_uptime_seconds": time.time() - app[keys.STARTED_AT],
            "gateway_start_time_seconds": app[keys.STARTED_AT],
            "gateway_loop_lag_seconds": app[keys.LOOP_LAG].longest_s,
            "engine_ready": float(engine.is_ready),
        },
        counters={
            **counters,
            "engine_restarts_total": engine.num_restarts,
            "gateway_engine_losses_total": engine.num_engine_losses,
            "gateway_resubmitted_total": engine.num_resubmitted,
            "gateway_wire_tokens_total": engine.num_tokens,
            "gateway_wire_bytes_total": engine.num_bytes,
        },
        shed=dict(app[keys.ADMISSION].shed),
    )
