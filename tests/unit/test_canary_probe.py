"""Where the probe of a pair stands: near zero, near the end, at every edge; once per table."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvpact.contract.canary import PROBE_TOKENS, probe_lengths, probe_positions, probe_tokens
from kvpact.contract.contract import Contract, RotaryTable
from kvpact.types import FrequencyPolicy, LayerKind
from tests.factories import make_contract, make_group, with_rotary


def by_length(contract: Contract, policy: FrequencyPolicy, *uppers: int | None) -> Contract:
    table = contract.layer_groups[0].rotary.tables[0]
    tables = tuple(
        RotaryTable(inv_freq=table.inv_freq, amplitude=1.0 + i, upper_length=upper)
        for i, upper in enumerate(uppers)
    )
    return with_rotary(contract, frequency_policy=policy, tables=tables)


def test_a_frozen_table_is_probed_once_over_the_context_that_both_serve() -> None:
    pair = make_contract(), make_contract(context_tokens=1000)
    assert probe_lengths(*pair) == (1000,)
    assert probe_positions(*pair, 1000) == (*range(9), *range(990, 998))


def test_each_table_that_a_request_can_get_is_probed() -> None:
    writer = by_length(make_contract(), FrequencyPolicy.BY_REQUEST_LENGTH, 512, None)
    assert probe_lengths(writer, make_contract()) == (512, 513, 4096)
    beyond = by_length(make_contract(), FrequencyPolicy.BY_REQUEST_LENGTH, 8192, None)
    assert probe_lengths(beyond, make_contract()) == (4096,)
    positions = probe_positions(writer, make_contract(), 4096)
    assert {511, 512, 4093} <= set(positions)
    assert probe_positions(writer, make_contract(), 512)[-1] == 509


def test_both_sides_of_each_windows_edge_are_probed() -> None:
    groups = (
        make_group(layers=(0,), kind=LayerKind.SLIDING, window=100),
        make_group(layers=(1,), kind=LayerKind.CHUNKED, window=1000),
    )
    contract = make_contract(layer_groups=groups)
    positions = probe_positions(contract, contract, 4096)
    assert {4094 - 100, 4094 - 99, 3999, 4000, 4093} <= set(positions)
    assert len(positions) == PROBE_TOKENS
    assert positions == tuple(sorted(set(positions)))


@pytest.mark.parametrize("context", [3, 4, 11, 12, 19, 20])
def test_a_short_context_gives_a_shorter_probe(context: int) -> None:
    contract = make_contract(context_tokens=context)
    assert probe_lengths(contract, contract) == (context,)
    positions = probe_positions(contract, contract, context)
    assert positions == tuple(range(min(PROBE_TOKENS, context - 2))) or positions[-1] == context - 3


def test_a_context_in_which_nothing_can_be_decoded_has_no_probe() -> None:
    contract = make_contract(context_tokens=2)
    assert probe_lengths(contract, contract) == ()


def test_more_edges_than_tokens_still_give_seventeen() -> None:
    groups = tuple(
        replace(make_group(layers=(i,), kind=LayerKind.SLIDING, window=100 * (i + 1))) for i in range(8)
    )
    contract = make_contract(layer_groups=groups)
    positions = probe_positions(contract, contract, 4096)
    assert len(positions) == PROBE_TOKENS
    assert {*range(9), 4093} <= set(positions)


def test_tokens_differ() -> None:
    assert len(set(probe_tokens(18, 264))) == 18
    assert max(probe_tokens(18, 5)) < 5
