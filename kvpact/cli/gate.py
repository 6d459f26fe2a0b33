"""The rollout gate: whether a worker with this config would find a partner in a running cluster."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvpact.cli.coordinator_client import CoordinatorClient
from kvpact.cli.output import EXIT_CONVERT, EXIT_REJECT
from kvpact.cli.preflight import side_contracts
from kvpact.config import Config
from kvpact.contract.identity_model import model_identity
from kvpact.contract.jsonform import contract_to_json
from kvpact.contract.sources.huggingface import override_config, read_config
from kvpact.errors import Unavailable, UnreadableSource
from kvpact.types import Role, VerdictWord

if TYPE_CHECKING:
    from kvpact.contract.contract import Contract

MESSAGE_CAP_BYTES = 4096
"""Kubernetes keeps so much of a termination message."""
RETRY_S = 1.0


def worker_contract(config: Config, folder: Path, role: Role) -> Contract:
    """The contract that a worker of `role` will have, digests included. Raises as `side_contracts`."""
    contract = side_contracts(config, folder)[role]
    override = (config.prefill if role is Role.PREFILL else config.decode).override
    identity = model_identity(folder, override_config(read_config(folder), override))
    model = replace(
        contract.model,
        function_digest=identity.function_digest,
        lm_head_digest=identity.lm_head_digest,
        tokenizer_digest=identity.tokenizer_digest,
    )
    return replace(contract, model=model)


def ask_gate(
    client: CoordinatorClient,
    role: Role,
    contract: Contract,
    *,
    wait_s: float,
    now: Callable[[], float],
    sleep: Callable[[float], object],
) -> dict[str, Any]:
    """The cluster's answer; a coordinator that doesn't answer yet is asked again for `wait_s` seconds.

    Raises:
        Unavailable: it never answered.
        BadRequest: the admin key is missing or wrong.
    """
    deadline_s = now() + wait_s
    while True:
        try:
            return client.post("/admin/check", {"role": role.value, "contract": contract_to_json(contract)})
        except Unavailable:
            if now() >= deadline_s:
                raise
        sleep(RETRY_S)


def exit_code_of(answer: dict[str, Any], *, accept: bool = False) -> int:
    """0 where the worker would find a partner or there is none to compare with.

    With `accept` a cluster whose partners all need a conversion isn't enough: 10.
    """
    if not answer["usable"]:
        return EXIT_REJECT
    words = {partner["verdict"] for partner in answer["partners"]}
    return EXIT_CONVERT if accept and words and VerdictWord.ACCEPT not in words else 0


def lines_of(answer: dict[str, Any]) -> list[str]:
    """The answer for people: a line for each partner with its plan, and what refuses it."""
    if not answer["partners"]:
        return [answer["note"]]
    lines = []
    for partner in answer["partners"]:
        lines.append(f"{partner['worker']}: {partner['verdict']}{_plan(partner['plan'])}")
        for difference in partner["differences"]:
            if difference["action"] == "reject":
                lines += _why(difference)
    return lines


def write_termination_message(path: Path, lines: list[str]) -> None:
    """Leaves the lines where Kubernetes shows them. Raises UnreadableSource."""
    text = "\n".join(lines).encode()[:MESSAGE_CAP_BYTES].decode(errors="ignore")
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        message = f"can't write --termination-log {path}: {error.strerror}"
        raise UnreadableSource(message, source=str(path)) from error


def _plan(steps: list[dict[str, Any]]) -> str:
    """Conversions by how exact they are: ` (relayout, reblock: bit_exact; rotate: rounding)`."""
    by_exactness: dict[str, list[str]] = {}
    for step in steps:
        by_exactness.setdefault(step["exactness"], []).append(step["op"])
    told = "; ".join(f"{', '.join(ops)}: {exactness}" for exactness, ops in by_exactness.items())
    return f" ({told})" if told else ""


def _why(difference: dict[str, Any]) -> list[str]:
    values = f"prefill {difference['writer']}, decode {difference['reader']}"
    told = (difference.get("explanation"), difference.get("remedy"))
    return [f"  {difference['field']}: {values}", *(f"    {text}" for text in told if text)]
