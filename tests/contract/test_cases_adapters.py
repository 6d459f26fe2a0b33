"""One adapter name, other weights: what an adapter holds is who it is, and a side without it refuses."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from kvpact.contract.identity import adapter_digest
from kvpact.errors import BadRequest
from kvpact.handoff.messages import Adapter, HandoffTerms
from kvpact.handoff.terms_codec import decode_terms, encode_terms
from tests.factories import make_contract
from tests.handoff_fakes import MAX_OUTPUT_TOKENS, READER, in_process_wire
from tests.reference_handoff import terms_of

RANK = 4
NAMES = ("layers.0.q_proj.lora_A", "layers.0.q_proj.lora_B")


def weights(seed: int) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(seed)
    return {name: generator.standard_normal((RANK, 16)).astype(np.float32) for name in NAMES}


def adapter(seed: int) -> Adapter:
    return Adapter(
        weights_digest=adapter_digest(weights(seed).items()),
        rank=RANK,
        alpha=8.0,
        scale=2.0,
        targets=("q_proj",),
    )


A, B, A_RELOADED = adapter(1), adapter(2), adapter(3)
"""The third is loaded under the first one's name, with other weights."""


def terms_under(chosen: Adapter | None) -> HandoffTerms:
    return replace(terms_of(make_contract(), 20), adapter=chosen)


def encoded(terms: HandoffTerms) -> bytes:
    return encode_terms(terms).SerializeToString(deterministic=True)


def test_base_a_b_and_a_reloaded_are_four_identities_of_one_prompt() -> None:
    four = [terms_under(chosen) for chosen in (None, A, B, A_RELOADED)]
    assert len({terms.token_digest for terms in four}) == 1
    for one, other in itertools.combinations(four, 2):
        assert one != other
        assert encoded(one) != encoded(other)
    assert [decode_terms(encode_terms(terms)).adapter for terms in four] == [None, A, B, A_RELOADED]


def test_an_adapter_is_its_tensors_in_any_order_and_nothing_else() -> None:
    tensors = weights(1)
    assert adapter_digest(reversed(list(tensors.items()))) == A.weights_digest
    assert adapter_digest({name: part.copy() for name, part in tensors.items()}.items()) == A.weights_digest
    changed = tensors | {NAMES[1]: np.nextafter(tensors[NAMES[1]], np.float32(9))}
    swapped = dict(zip(NAMES, reversed(list(tensors.values())), strict=True))
    reshaped = {name: part.T for name, part in tensors.items()}
    digests = {adapter_digest(other.items()) for other in (tensors, changed, swapped, reshaped, {})}
    assert len(digests) == 5


@pytest.mark.parametrize(
    "change", [{"rank": 8}, {"alpha": 16.0}, {"scale": 1.0}, {"targets": ("k_proj", "q_proj")}]
)
def test_the_same_weights_applied_otherwise_are_another_identity(change: dict[str, object]) -> None:
    other = replace(A, **change)  # type: ignore[arg-type]
    assert encoded(terms_under(other)) != encoded(terms_under(A))


@pytest.mark.parametrize("chosen", [A, B, A_RELOADED])
async def test_a_cache_made_with_an_adapter_is_refused_by_a_side_without_and_both_are_named(
    chosen: Adapter,
) -> None:
    async with in_process_wire() as wire:
        await wire.sender().pair(READER)
        with pytest.raises(BadRequest) as refused:
            await wire.port.reserve(replace(wire.terms(), adapter=chosen), MAX_OUTPUT_TOKENS)
        assert refused.value.param == "terms.adapter"
        assert f"is {chosen.weights_digest.hex()} of rank 4" in str(refused.value)
        assert "this reader serves the model without adapters only" in str(refused.value)
        assert wire.reader.all_free()
        await wire.port.reserve(wire.terms(), MAX_OUTPUT_TOKENS)
