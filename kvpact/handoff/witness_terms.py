"""The rows that a handoff's writer has to show: the nonce's choice at the positions of its terms."""

from __future__ import annotations

from kvpact.contract.contract import Contract
from kvpact.contract.witness_places import Place, witness_places
from kvpact.handoff.chunks import tokens_before
from kvpact.handoff.messages import HandoffTerms


def places_to_show(
    writer: Contract, terms: HandoffTerms, *, nonce: bytes, first_computed: int
) -> tuple[Place, ...]:
    """Places among the tokens that the writer computes, sends, and the next token can reach; ascending.

    Args:
        first_computed: first token that the writer computes; the reader holds those before it.
    """
    groups = writer.layer_groups
    starts = {entry.group: tokens_before(terms.positions, entry.start) for entry in terms.required}
    first_tokens = {
        layer: max(first_computed, starts.get(index, 0))
        for index, group in enumerate(groups)
        for layer in group.layers
    }
    return witness_places(writer, nonce, prompt_tokens=len(terms.token_ids), first_tokens=first_tokens)
