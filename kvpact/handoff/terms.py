"""Terms of one handoff: what a writer must say about a prompt, and whether it said it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import numpy as np

from kvpact.contract.contract import Contract
from kvpact.contract.reach import first_reachable
from kvpact.contract.tables import table_at
from kvpact.errors import BadRequest
from kvpact.handoff.messages import GroupTable, HandoffTerms, RequiredPositions
from kvpact.types import ContractDigest, HandoffId, PositionRun, WorkerLife


def make_terms(
    *,
    handoff_id: HandoffId,
    writer: WorkerLife,
    reader: WorkerLife,
    contract: Contract,
    contract_digest: ContractDigest,
    token_ids: Iterable[int],
    table_length: int,
    positions: Iterable[int] | None = None,
    canary: bool = False,
) -> HandoffTerms:
    """Terms of a prompt without an adapter; tokens stand from position 0 on unless `positions` says where."""
    tokens = tuple(token_ids)
    places = tuple(range(len(tokens)) if positions is None else positions)
    next_position = places[-1] + 1
    return HandoffTerms(
        handoff_id=handoff_id,
        writer=writer,
        reader=reader,
        contract_digest=contract_digest,
        token_ids=tokens,
        token_digest=digest_tokens(tokens),
        positions=position_runs(places),
        next_position=next_position,
        table_length=table_length,
        tables=tables_at(contract, table_length),
        required=required_positions(contract, next_position),
        canary=canary,
    )


def position_runs(positions: Sequence[int]) -> tuple[PositionRun, ...]:
    """Ascending positions of the tokens of a prompt as runs; slots are dense, whatever gaps there are."""
    starts = [i for i, position in enumerate(positions) if i == 0 or position != positions[i - 1] + 1]
    ends = [*starts[1:], len(positions)]
    return tuple(
        PositionRun(
            start=positions[start],
            count=end - start,
            slot_start=None if positions[start] == start else start,
        )
        for start, end in zip(starts, ends, strict=True)
    )


def positions_of(runs: Iterable[PositionRun]) -> tuple[int, ...]:
    """Position of each token, in token order."""
    return tuple(position for run in runs for position in range(run.start, run.start + run.count))


def digest_tokens(token_ids: Sequence[int]) -> bytes:
    """SHA-256 over token ids as little-endian int32."""
    return hashlib.sha256(np.asarray(token_ids, dtype="<i4").tobytes()).digest()


def tables_at(contract: Contract, table_length: int) -> tuple[GroupTable, ...]:
    """The table that runs for `table_length` tokens, for each group; None where keys aren't rotated."""
    context = contract.model.context_tokens
    return tuple(
        GroupTable(group=index, table=table_at(group.rotary, length=table_length, context_tokens=context))
        for index, group in enumerate(contract.layer_groups)
    )


def required_positions(contract: Contract, next_position: int) -> tuple[RequiredPositions, ...]:
    """Positions that the next token can reach, for each group."""
    return tuple(
        RequiredPositions(group=index, start=first_reachable(group, next_position), end=next_position)
        for index, group in enumerate(contract.layer_groups)
    )


def check_terms(terms: HandoffTerms, writer: Contract, *, context_tokens: int) -> None:
    """Gives nothing back for terms that agree with themselves and with the writer's contract.

    Args:
        context_tokens: positions that both sides serve.

    Raises:
        BadRequest: `param` names the field at fault.
    """
    if not terms.token_ids:
        raise _refusal("token_ids", "is empty; expected at least one token")
    if terms.token_digest != digest_tokens(terms.token_ids):
        raise _refusal("token_digest", "isn't the digest of token_ids")
    _check_positions(terms, context_tokens)
    if not terms.next_position <= terms.table_length <= context_tokens:
        wanted = f"[{terms.next_position}, {context_tokens}]"
        raise _refusal("table_length_tokens", f"is {terms.table_length}; expected {wanted}")
    if terms.adapter is not None:
        digest, rank = terms.adapter.weights_digest.hex(), terms.adapter.rank
        raise _refusal(
            "adapter", f"is {digest} of rank {rank}; this reader serves the model without adapters only"
        )
    _check_tables(terms, writer)
    _check_required(terms, writer)


def _check_positions(terms: HandoffTerms, context_tokens: int) -> None:
    prompt_tokens, told = len(terms.token_ids), sum(run.count for run in terms.positions)
    if told != prompt_tokens:
        raise _refusal("positions", f"cover {told} tokens; token_ids holds {prompt_tokens}")
    last_end, dense = 0, 0
    for index, run in enumerate(terms.positions):
        if run.start < last_end:
            raise _refusal(f"positions[{index}].start", f"is {run.start}; the run before ends at {last_end}")
        slot = run.start if run.slot_start is None else run.slot_start
        if slot != dense:
            raise _refusal(
                f"positions[{index}].slot_start",
                f"says slot {slot}; this reader keeps tokens in dense slots, {dense} for this run",
            )
        last_end, dense = run.start + run.count, dense + run.count
    if last_end > context_tokens:
        raise _refusal("positions", f"end at {last_end}; the context is {context_tokens} tokens")
    if terms.next_position < last_end:
        raise _refusal("next_position", f"is {terms.next_position}; positions end at {last_end}")


def _check_tables(terms: HandoffTerms, writer: Contract) -> None:
    if len({entry.group for entry in terms.tables}) != len(terms.tables):
        raise _refusal("tables", "name a layer group twice")
    shipped = {entry.group: entry.table for entry in terms.tables}
    for expected in tables_at(writer, terms.table_length):
        found = shipped.pop(expected.group, None)
        if found != expected.table:
            problem = (
                "is absent" if found is None else "isn't the table of the paired contract at this length"
            )
            raise _refusal(f"tables of group {expected.group}", problem)
    if shipped:
        raise _refusal("tables", f"name group {min(shipped)}, which the paired contract hasn't")


def _check_required(terms: HandoffTerms, writer: Contract) -> None:
    shipped = {entry.group: entry for entry in terms.required}
    if len(shipped) != len(terms.required) or not shipped.keys() <= set(range(len(writer.layer_groups))):
        raise _refusal("required", "names a layer group twice, or one that the paired contract hasn't")
    for expected in required_positions(writer, terms.next_position):
        found = shipped.get(expected.group)
        if found is None or found.start > expected.start or found.end != expected.end:
            told = "nothing" if found is None else f"[{found.start}, {found.end})"
            wanted = f"[{expected.start}, {expected.end})"
            raise _refusal(
                f"required of group {expected.group}", f"is {told}; the next token reaches {wanted}"
            )


def _refusal(field: str, problem: str) -> BadRequest:
    return BadRequest(f"terms.{field} {problem}", param=f"terms.{field}")
