"""Routes for operators: would a worker find a partner here, and let one finish its work."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

from fastapi import FastAPI, Request
from pydantic import BaseModel, ConfigDict, Field

from coordinator.api.bodies import read_body
from coordinator.api.context import ApiContext, check_admin
from coordinator.ports import RegisteredWorker
from coordinator.registry import WorkerState
from kvpact.config import Config
from kvpact.contract.compare import Policy, compare, pairing_reach
from kvpact.contract.contract import Contract
from kvpact.contract.jsonform import contract_from_json, verdict_to_json
from kvpact.errors import BadRequest, UnreadableSource
from kvpact.types import Role, Verdict, VerdictWord

NOTHING = "nothing to compare with"
MOST_WORKERS = 1024
"""Of one role: beyond it, a number is a slip."""


class CheckBody(BaseModel):
    """A worker that isn't there yet: its role and the JSON of its contract."""

    model_config = ConfigDict(extra="forbid")

    role: Role
    contract: dict[str, Any]


class ScaleBody(BaseModel):
    """How many workers there should be; a role that is left out stays as it is."""

    model_config = ConfigDict(extra="forbid")

    prefill: int | None = Field(default=None, ge=1, le=MOST_WORKERS)
    decode: int | None = Field(default=None, ge=1, le=MOST_WORKERS)


class DrainBody(BaseModel):
    """A worker by name, or all workers of a machine by its address."""

    model_config = ConfigDict(extra="forbid")

    worker: str = Field(min_length=1, max_length=253)


def add_admin_routes(app: FastAPI, context: ApiContext) -> None:
    """Adds POST /admin/check, /admin/drain and /admin/scale."""
    _add_scale_route(app, context)

    @app.post("/admin/check")
    async def check(request: Request) -> dict[str, Any]:
        check_admin(request)
        body = await read_body(request, CheckBody, context.context_tokens())
        partners = partners_of(body.role, _contract(body), context.fleet.snapshot().workers, context.config)
        return gate_answer(partners)

    @app.post("/admin/drain")
    async def drain(request: Request) -> dict[str, Any]:
        check_admin(request)
        body = await read_body(request, DrainBody, context.context_tokens())
        states = context.fleet.snapshot().workers
        named = [state.worker for state in states if _is_meant(state.worker, body.worker)]
        if not named:
            known = ", ".join(sorted(state.worker.life.worker for state in states)) or "none"
            raise BadRequest(f"there is no worker {body.worker!r}; known: {known}", param="worker")
        running = await asyncio.gather(*(context.fleet.drain(worker.life) for worker in named))
        names = [worker.life.worker for worker in named]
        return {
            "workers": [
                {"worker": name, "running_requests": count}
                for name, count in zip(names, running, strict=True)
            ]
        }


def _add_scale_route(app: FastAPI, context: ApiContext) -> None:
    @app.post("/admin/scale")
    async def scale(request: Request) -> dict[str, Any]:
        check_admin(request)
        body = await read_body(request, ScaleBody, context.context_tokens())
        if context.scaling is None:
            raise BadRequest("workers aren't started by this coordinator; start and end them where they run")
        asked = {Role.PREFILL: body.prefill, Role.DECODE: body.decode}
        wanted = {role: count for role, count in asked.items() if count is not None}
        leaving = context.scaling.scale(wanted)
        return {"wanted": {role.value: count for role, count in wanted.items()}, "leaving": leaving}


def partners_of(
    role: Role, contract: Contract, workers: Iterable[WorkerState], config: Config
) -> list[tuple[str, Verdict]]:
    """The verdict with every worker of the other role: its name and what the pair would agree on."""
    policy = Policy(on_convertible=config.handoff.on_convertible, lossy=config.handoff.lossy)
    verdicts = []
    for state in workers:
        other = state.worker.contract
        if state.worker.role is role:
            continue
        writer, reader = (contract, other) if role is Role.PREFILL else (other, contract)
        verdict = compare(writer, reader, policy, pairing_reach(writer, reader))
        verdicts.append((state.worker.life.worker, verdict))
    return verdicts


def gate_answer(partners: Iterable[tuple[str, Verdict]]) -> dict[str, Any]:
    """What the gate is told: usable where at least one partner is, or where there is none to compare with."""
    shown = [{"worker": worker} | verdict_to_json(verdict) for worker, verdict in partners]
    usable = not shown or any(each["verdict"] != VerdictWord.REJECT.value for each in shown)
    return {"usable": usable, "note": "" if shown else NOTHING, "partners": shown}


def _is_meant(worker: RegisteredWorker, name_or_host: str) -> bool:
    return name_or_host in (worker.life.worker, worker.endpoint.rpartition(":")[0])


def _contract(body: CheckBody) -> Contract:
    """Raises BadRequest that names the field."""
    try:
        return contract_from_json(body.contract)
    except UnreadableSource as error:
        raise BadRequest(f"contract: {error}", param="contract") from error
