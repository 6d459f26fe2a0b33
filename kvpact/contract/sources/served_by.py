"""How other servers pick a rotary table where a model has several: the same model, read as they serve it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from kvpact.contract.contract import Contract, Rotary, RotaryTable
from kvpact.contract.rope import formula_table
from kvpact.contract.validate import validate_contract
from kvpact.errors import BadRequest
from kvpact.types import FrequencyPolicy, KeyState

Rule = Callable[[Rotary, int], Rotary]


def apply_served_by(contract: Contract, server: str, served_length: int | None = None) -> Contract:
    """The contract of the same model in another server's hands.

    Only layers with a table by request length change; one table for every length is everyone's.
    `served_length` is the most tokens that the server was started for, None: the contract's context.

    Raises:
        BadRequest: an unknown server, a length below 1, a policy that is another server's already, or one
            that the server doesn't have.
    """
    rule = SERVERS.get(server)
    if rule is None:
        raise BadRequest(f"served by {server!r}: expected one of {', '.join(SERVERS)}", param="served_by")
    length = contract.model.context_tokens if served_length is None else served_length
    if length < 1:
        raise BadRequest(f"served length is {length}, expected at least 1 token", param="max_model_len")
    groups = tuple(
        replace(group, rotary=_served(group.rotary, rule, length)) for group in contract.layer_groups
    )
    served = replace(contract, layer_groups=groups)
    validate_contract(served)
    return served


def _served(rotary: Rotary, rule: Rule, length: int) -> Rotary:
    policy = rotary.frequency_policy
    if rotary.key_state is KeyState.NONE or policy is FrequencyPolicy.FROZEN:
        return rotary
    if policy is not FrequencyPolicy.BY_REQUEST_LENGTH:
        raise BadRequest(
            f"tables are picked {policy.value} already, which is another server's rule", param="served_by"
        )
    return rule(rotary, length)


def _by_current_length(rotary: Rotary, _: int) -> Rotary:
    """transformers: each forward takes the table of the length reached, and keeps the cache beneath it."""
    return replace(rotary, frequency_policy=FrequencyPolicy.BY_CURRENT_LENGTH)


def _vllm(rotary: Rotary, length: int) -> Rotary:
    """Once at start: longrope by max_model_len; dynamic scaling at the length that its factor promises."""
    if rotary.formula is None:
        return _picked(rotary, _at(rotary.tables, length))
    _, _, factor, context = rotary.formula.parameters
    return _picked(rotary, formula_table(rotary.formula, int(context * factor)))


def _llama_cpp(rotary: Rotary, length: int) -> Rotary:
    """Once for a context: short factors up to the original length of the context size, else the long ones."""
    if rotary.formula is not None:
        raise BadRequest(
            "llama.cpp has no dynamic scaling: the model can't be served by it", param="served_by"
        )
    return _picked(rotary, _at(rotary.tables, length))


def _at(tables: tuple[RotaryTable, ...], length: int) -> RotaryTable:
    fitting = (table for table in tables if table.upper_length is None or length <= table.upper_length)
    return next(fitting, tables[-1])


def _picked(rotary: Rotary, table: RotaryTable) -> Rotary:
    return replace(
        rotary,
        frequency_policy=FrequencyPolicy.BY_SERVED_LENGTH,
        tables=(replace(table, upper_length=None),),
        formula=None,
    )


SERVERS: Mapping[str, Rule] = {
    "transformers": _by_current_length,
    "vllm": _vllm,
    "llama.cpp": _llama_cpp,
}
"""Servers by the name that people give them."""
