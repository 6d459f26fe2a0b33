"""The rows that a handoff's writer has to show: the nonce's choice at the positions of its terms."""

from __future__ import annotations

from kvpact.contract.cached_places import cached_places
from kvpact.contract.content_identity import ContentId, NameMaker, own_passage
from kvpact.contract.contract import Contract
from kvpact.contract.witness_places import Place, witness_places
from kvpact.handoff.chunks import tokens_before
from kvpact.handoff.messages import HandoffTerms
from kvpact.handoff.terms import positions_of


def places_to_show(
    writer: Contract, terms: HandoffTerms, *, nonce: bytes, first_computed: int, held: int = 0
) -> tuple[Place, ...]:
    """Places among the tokens that the writer computes, sends, and the next token can reach; ascending.

    Of blocks that it takes from its cache and sends, the rows that they keep.

    Args:
        first_computed: first token that the writer computes; it takes those before it from its cache.
        held: tokens that the reader holds, which aren't sent.
    """
    starts = _first_reached(writer, terms)
    first_tokens = {layer: max(first_computed, held, start) for layer, start in starts.items()}
    computed = witness_places(writer, nonce, prompt_tokens=len(terms.token_ids), first_tokens=first_tokens)
    if first_computed <= held:
        return computed
    size = writer.layout.block_size
    cached = cached_places(
        writer,
        nonce,
        _names(writer, terms),
        prompt_tokens=len(terms.token_ids),
        blocks=range(held // size, first_computed // size),
        first_blocks={layer: start // size for layer, start in starts.items()},
    )
    return tuple(sorted({*computed, *cached}))


def _first_reached(writer: Contract, terms: HandoffTerms) -> dict[int, int]:
    """First token of each layer that the next token can reach."""
    starts = {entry.group: tokens_before(terms.positions, entry.start) for entry in terms.required}
    return {
        layer: starts.get(index, 0)
        for index, group in enumerate(writer.layer_groups)
        for layer in group.layers
    }


def _names(writer: Contract, terms: HandoffTerms) -> tuple[ContentId, ...]:
    """Of the prompt's whole blocks, as the writer names them itself."""
    makes = NameMaker(writer, own_passage(writer), writer.layout.block_size)
    return makes.names(terms.token_ids, positions_of(terms.positions), terms.table_length)
