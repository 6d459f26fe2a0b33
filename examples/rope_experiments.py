"""What goes wrong when keys of one rotary table meet queries of another, and what turning the keys repairs.

    python examples/rope_experiments.py [--json]

1. Mixed phase: one query, one key, two frequencies; the bound on how far the logit may move.
2. Local repairs: a key brought to another table (rephase) and to another position (rebase).
3. Two layers: rephased keys repair the first layer and not the second, since history was computed before.
4. A threshold: dynamic NTK changes tables while a sequence grows; cache kept, rephased, and rebuilt.

Legend: T tokens, D lanes of the only head. Projections are the identity, so a state is its own query, key and
value.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import replace

import torch

from kvpact.contract.contract import Rotary, RotaryTable
from kvpact.contract.rope import DynamicScaling, RopeParameters, table_from_parameters
from kvpact.contract.rotation import rebase, rephase, rotate, rotation_at
from kvpact.contract.tables import chord
from kvpact.types import FrequencyPolicy, KeyState, LaneOrder, RotationSite

OLD, NEW = (RotaryTable(inv_freq=(frequency,), amplitude=1.0) for frequency in (0.9, 0.2))
TOKENS_TD = torch.tensor([[1.0, 0.2], [0.3, 1.0], [-0.8, 0.4]])
"""Three tokens of two lanes."""
THRESHOLD = 8
"""Tokens up to which the dynamic policy keeps its first table."""
Experiments = dict[str, dict[str, float]]


def main() -> None:
    """Prints every number, as a table or as JSON."""
    parser = argparse.ArgumentParser(
        description="Rotary experiments: mixed phases, local repairs, deep history."
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    found = experiments()
    if parser.parse_args().json:
        print(json.dumps(found))
        return
    for title, numbers in found.items():
        print(title.replace("_", " "))
        for name, value in numbers.items():
            print(f"  {name.replace('_', ' '):<58}{round(value, 5) + 0.0:>9.5f}")


def experiments() -> Experiments:
    """Every experiment by name; the same numbers on every run."""
    return {
        "mixed_phase": mixed_phase(),
        "local_repairs": local_repairs(),
        "two_layers": two_layers(),
        "threshold": threshold(),
    }


def mixed_phase() -> dict[str, float]:
    """q = k = (1, 0), query at 2, key at 1, frequency pi/2 when the key was cached and pi/4 now."""
    old, new = _one_lane(math.pi / 2), _one_lane(math.pi / 4)
    unit_D = torch.tensor([1.0, 0.0])
    mixed = score(unit_D, unit_D, query=(2, new), key=(1, old))
    consistent = score(unit_D, unit_D, query=(2, new), key=(1, new))
    bound = chord(math.pi / 4) / math.sqrt(2)
    draw = torch.randn((1000, 2, 2), generator=torch.Generator().manual_seed(0))
    shares = [
        abs(score(q, k, query=(2, new), key=(1, old)) - score(q, k, query=(2, new), key=(1, new)))
        / (bound * float(q.norm() * k.norm()))
        for q, k in draw
    ]
    return {
        "score_with_the_old_key": mixed,
        "score_with_one_table": consistent,
        "moved_by": abs(mixed - consistent),
        "bound": bound,
        "largest_share_of_the_bound_in_1000_draws": max(shares),
    }


def local_repairs() -> dict[str, float]:
    """Repairs of one key whose raw projection is unchanged: exact, and only that."""
    old, new = _one_lane(math.pi / 2), _one_lane(math.pi / 4)
    raw_TD, at_T = torch.tensor([[1.0, 0.0]]), torch.tensor([1])
    cached_TD = turn(raw_TD, old, start=1)
    rephased_TD = rephase(cached_TD[:, None], _rotary(old), old, new, at_T)[:, 0]
    moved_TD = rebase(turn(raw_TD, new, start=1)[:, None], _rotary(new), at_T, 3)[:, 0]
    query_D, moved_query_D = turn(raw_TD, new, start=2)[0], turn(raw_TD, new, start=5)[0]
    return {
        "score_with_the_rephased_key": float(query_D @ rephased_TD[0]) / math.sqrt(2),
        "score_with_key_and_query_moved_by_3": float(moved_query_D @ moved_TD[0]) / math.sqrt(2),
        "score_with_the_key_alone_moved_by_3": float(query_D @ moved_TD[0]) / math.sqrt(2),
    }


def two_layers() -> dict[str, float]:
    """Two tokens under the old table, a third under the new one over rephased keys, against a fresh start."""
    history_TD, last_D = TOKENS_TD[:2], TOKENS_TD[2]
    fresh = layer(TOKENS_TD, NEW)
    first = step(last_D, history_TD, OLD, NEW, repair=True)
    old_history_TD = layer(history_TD, OLD)
    second = step(first, old_history_TD, OLD, NEW, repair=True)
    return {
        "first_layer_off_by": float((first - fresh[2]).norm()),
        "second_layer_off_by": float((second - layer(fresh, NEW)[2]).norm()),
        "history_itself_off_by": float((old_history_TD[1] - fresh[1]).norm()),
    }


def threshold() -> dict[str, float]:
    """Eight tokens under the first table, a ninth under the next: what the last state is off by, per layer.

    The target is the whole sequence under the table of its final length.
    """
    before, after = dynamic_table(THRESHOLD), dynamic_table(THRESHOLD + 1)
    draw = torch.Generator().manual_seed(0)
    tokens_TD = torch.randn((THRESHOLD + 1, 4), generator=draw)
    target = [layer(tokens_TD, after)]
    target.append(layer(target[0], after))
    found = {"a_short_request_gets_the_first_table_again": float(dynamic_table(THRESHOLD) == before)}
    for name, made_by, repair in (
        ("kept", before, False),
        ("rephased", before, True),
        ("rebuilt", after, False),
    ):
        history_TD, last_D = tokens_TD[:-1], tokens_TD[-1]
        for depth, word in enumerate(("first", "second")):
            last_D = step(last_D, history_TD, made_by, after, repair=repair)
            found[f"cache_{name}_{word}_layer_off_by"] = float((last_D - target[depth][-1]).norm())
            history_TD = layer(history_TD, made_by)
    return found


def dynamic_table(length: int) -> RotaryTable:
    """Table of a request of `length` tokens under dynamic NTK: four lanes, theta 100, factor 4."""
    scaling = DynamicScaling(factor=4.0, context_tokens=THRESHOLD)
    return table_from_parameters(RopeParameters(theta=100.0, rotary_dim=4, scaling=scaling), length)


def layer(x_TD: torch.Tensor, table: RotaryTable) -> torch.Tensor:
    """Causal attention with a residual connection, every token under one table."""
    turned_TD = turn(x_TD, table)
    rows = [attend(turned_TD[t], turned_TD[: t + 1], x_TD[: t + 1]) for t in range(len(x_TD))]
    return x_TD + torch.stack(rows)


def step(
    x_D: torch.Tensor, history_TD: torch.Tensor, old: RotaryTable, new: RotaryTable, *, repair: bool
) -> torch.Tensor:
    """One more token under `new` over a cache that `old` made; `repair` brings its keys to `new` first."""
    positions_T = torch.arange(len(history_TD))
    keys_TD = turn(history_TD, old)
    if repair:
        keys_TD = rephase(keys_TD[:, None], _rotary(old), old, new, positions_T)[:, 0]
    q_D = turn(x_D[None], new, start=len(history_TD))[0]
    return x_D + attend(q_D, torch.cat((keys_TD, q_D[None])), torch.cat((history_TD, x_D[None])))


def attend(q_D: torch.Tensor, k_TD: torch.Tensor, v_TD: torch.Tensor) -> torch.Tensor:
    """One query over all given keys."""
    return ((k_TD @ q_D) / math.sqrt(len(q_D))).softmax(0) @ v_TD


def turn(x_TD: torch.Tensor, table: RotaryTable, start: int = 0) -> torch.Tensor:
    """[T, D] rotated at positions start, start + 1, ..."""
    positions_T = torch.arange(start, start + len(x_TD))
    return rotate(x_TD[:, None], rotation_at(_rotary(table), table, positions_T))[:, 0]


def score(
    q_D: torch.Tensor, k_D: torch.Tensor, *, query: tuple[int, RotaryTable], key: tuple[int, RotaryTable]
) -> float:
    """Attention logit of a query and a key, each at its position under its table."""
    turned_q = turn(q_D[None], query[1], start=query[0])[0]
    turned_k = turn(k_D[None], key[1], start=key[0])[0]
    return float(turned_q @ turned_k) / math.sqrt(len(q_D))


def _one_lane(frequency: float) -> RotaryTable:
    return RotaryTable(inv_freq=(frequency,), amplitude=1.0)


def _rotary(table: RotaryTable) -> Rotary:
    """Every lane of the head turns by `table`, for good."""
    return Rotary(
        key_state=KeyState.ROTATED,
        site=RotationSite.WRITER,
        rotary_dim=2 * len(table.inv_freq),
        lane_offset=0,
        stored_lane_order=LaneOrder.HALF_SPLIT,
        frequency_policy=FrequencyPolicy.FROZEN,
        tables=(replace(table, upper_length=None),),
    )


if __name__ == "__main__":
    main()
