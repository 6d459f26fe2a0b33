"""Routes that tell how the coordinator and its workers are."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, Response

from coordinator.api.context import ApiContext, may_see_values
from coordinator.registry import PairState, WorkerState
from kvpact.contract.identity import contract_digest
from kvpact.contract.jsonform import verdict_to_json
from kvpact.errors import KvpactError
from kvpact.handoff.messages import WorkerDescription
from kvpact.types import WorkerLife


def add_status_routes(app: FastAPI, context: ApiContext) -> None:
    """Adds /health, /ping, /version, /ready, /metrics, /admin/pairs and /admin/workers."""
    _add_health_routes(app, context)
    _add_admin_routes(app, context)

    @app.get("/metrics")
    async def metrics(request: Request) -> Response:
        snapshot = context.fleet.snapshot()
        names = _names(snapshot.workers, with_values=may_see_values(request))
        text = context.metrics.exposition(
            pairs=[pair.word() for pair in snapshot.pairs],
            transports=[pair.transport.name for pair in snapshot.pairs if pair.transport],
            loads=[
                (state.worker.role, name, state.load)
                for name, state in zip(names, snapshot.workers, strict=True)
            ],
            counters=[
                (state.worker.role, state.worker.life.worker, state.counters) for state in snapshot.workers
            ],
        )
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")


def _add_health_routes(app: FastAPI, context: ApiContext) -> None:

    @app.get("/health")
    @app.get("/ping")
    @app.post("/ping")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/version")
    async def show_version() -> dict[str, str]:
        return {"version": version("kvpact")}

    @app.get("/ready")
    async def ready(request: Request) -> Response:
        obstacle = context.obstacle()
        if obstacle is None:
            return JSONResponse({"ready": True, "reasons": []})
        told = context.told(obstacle, request)
        reasons = [{"code": told.code, "message": told.message} | dict(told.extra)]
        return JSONResponse({"ready": False, "reasons": reasons}, status_code=503, headers=dict(told.headers))


def _add_admin_routes(app: FastAPI, context: ApiContext) -> None:
    @app.get("/admin/pairs")
    async def pairs(request: Request) -> dict[str, Any]:
        with_values = may_see_values(request)
        snapshot = context.fleet.snapshot()
        contracts = {
            state.worker.life: contract_digest(state.worker.contract).hex() for state in snapshot.workers
        }
        return {"pairs": [_pair(pair, contracts, with_values=with_values) for pair in snapshot.pairs]}

    @app.get("/admin/workers")
    async def workers(request: Request) -> Response:
        if not may_see_values(request):
            return JSONResponse({"workers": []}, status_code=403)
        states = context.fleet.snapshot().workers
        return JSONResponse({"workers": await asyncio.gather(*(_worker(context, state) for state in states))})


def _names(workers: Sequence[WorkerState], *, with_values: bool) -> list[str]:
    """Names of workers, or their places among the known ones for those who may not see names."""
    return [state.worker.life.worker if with_values else str(place) for place, state in enumerate(workers)]


def _pair(pair: PairState, contracts: Mapping[WorkerLife, str], *, with_values: bool) -> dict[str, Any]:
    """A pair with its verdict; `contracts` are the digests of what its workers carry."""
    shown: dict[str, Any] = verdict_to_json(pair.verdict) if pair.verdict else {"verdict": pair.word()}
    if not with_values:
        hidden = ("writer", "reader", "explanation")
        differences = [
            {key: value for key, value in each.items() if key not in hidden}
            for each in shown.get("differences", [])
        ]
        return shown | {"differences": differences}
    names = {
        "prefill": pair.key.prefill.worker,
        "decode": pair.key.decode.worker,
        "contracts": {"prefill": contracts.get(pair.key.prefill), "decode": contracts.get(pair.key.decode)},
    }
    carried = pair.transport and {"name": pair.transport.name, "reason": pair.transport.reason}
    return names | {"usable": pair.usable(), "trouble": pair.trouble, "transport": carried} | shown


async def _worker(context: ApiContext, state: WorkerState) -> dict[str, Any]:
    """What the registry knows of a worker and what it says of itself now."""
    worker, scaling = state.worker, context.scaling
    draining = state.load.draining or (scaling is not None and scaling.leaves(worker.life.worker))
    known = {
        "worker": worker.life.worker,
        "role": worker.role.value,
        "incarnation": worker.life.incarnation.hex(),
        "endpoint": worker.endpoint,
        "contract_digest": contract_digest(worker.contract).hex(),
        "pid": worker.pid,
        "started_here": scaling is not None and scaling.owns(worker.life.worker),
    }
    try:
        described = await context.fleet.port(worker.life).describe()
        found = known | _described(described) | {"obstacle": context.fleet.obstacle(worker.life) or None}
        return found | {"draining": draining or described.load.draining}
    except KvpactError as error:
        return known | {"trouble": f"was draining and has ended, or {error}" if draining else str(error)}


def _described(description: WorkerDescription) -> dict[str, Any]:
    counters, load = description.counters, description.load
    return {
        "blocks": {
            "free": load.blocks.free,
            "total": load.blocks.total,
            "held": dict(load.blocks.held),
            "cached": load.blocks.cached,
        },
        "running_requests": load.running_requests,
        "waiting_requests": load.waiting_requests,
        "draining": load.draining,
        "counters": {
            "computed_prompt_tokens": counters.computed_prompt_tokens,
            "computed_output_tokens": counters.computed_output_tokens,
            "forward_steps": counters.forward_steps,
            "committed_handoffs": counters.committed_handoffs,
            "failed_handoffs": counters.failed_handoffs,
            "handoff_bytes": counters.handoff_bytes,
        },
    }
