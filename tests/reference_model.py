"""A tiny decoder of two layers in float64, run as a contract says: prefill, and one more token over a cache.

Lanes are half-split inside; how a cache stores them is the caller's business.
Shapes: T tokens, H heads, D lanes, E hidden.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from kvpact.contract.contract import Contract, LayerGroup
from kvpact.types import KeyState, LaneOrder, LayerKind
from tests.reference_cache import turned_THD

HIDDEN = 24
SINK_LOGIT = 0.3


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefill:
    """What a prompt leaves behind."""

    keys: list[torch.Tensor]
    """Raw keys of each layer, [T, H, D] in float64, half-split."""
    values: list[torch.Tensor]
    output_TE: torch.Tensor


def weights(seed: int, layer: int, name: str, rows: int) -> torch.Tensor:
    """A projection [HIDDEN, rows] that only its name decides; a wider one begins with the narrower."""
    generator = torch.Generator().manual_seed(1000 * seed + 10 * layer + "qkvo".index(name))
    return torch.randn((128, HIDDEN), generator=generator, dtype=torch.float64)[:rows].T / HIDDEN**0.5


def embedded(seed: int, tokens: int) -> torch.Tensor:
    """Inputs [T, E] of a prompt."""
    generator = torch.Generator().manual_seed(seed + 77)
    return torch.randn((tokens, HIDDEN), generator=generator, dtype=torch.float64)


def prefill(contract: Contract, seed: int, x_TE: torch.Tensor, *, attends_raw: bool = False) -> Prefill:
    """The whole prompt at positions from 0 on; `attends_raw`: rotated keys go to the cache only."""
    keys, values, positions = [], [], list(range(len(x_TE)))
    for layer in range(contract.layer_count()):
        group = contract.group_of(layer)
        q_THD, k_THD, v_THD = _projected(group, seed, layer, x_TE)
        seen_THD = k_THD if attends_raw else rotated(group, k_THD, positions)
        q_THD = q_THD if attends_raw else rotated(group, q_THD, positions)
        rows = [_attend(group, q_THD[t], seen_THD[: t + 1], v_THD[: t + 1], t) for t in positions]
        x_TE = x_TE + _projected_out(seed, layer, torch.stack(rows))
        keys.append(k_THD)
        values.append(v_THD)
    return Prefill(keys=keys, values=values, output_TE=x_TE)


def decode(
    contract: Contract, seed: int, x_E: torch.Tensor, keys: list[torch.Tensor], values: list[torch.Tensor]
) -> torch.Tensor:
    """The next token's output [E] over a cache with keys as the contract's key_state says, half-split."""
    position = len(keys[0])
    for layer in range(contract.layer_count()):
        group = contract.group_of(layer)
        q_THD, k_THD, v_THD = _projected(group, seed, layer, x_E[None])
        cached = keys[layer].double()
        if group.rotary.key_state is KeyState.RAW:
            cached = rotated(group, cached, list(range(position)))
        seen = torch.cat((cached, rotated(group, k_THD, [position])))
        q_HD = rotated(group, q_THD, [position])[0]
        row = _attend(group, q_HD, seen, torch.cat((values[layer].double(), v_THD)), position)
        x_E = x_E + _projected_out(seed, layer, row[None])[0]
    return x_E


def rotated(group: LayerGroup, x_THD: torch.Tensor, positions: list[int]) -> torch.Tensor:
    """`x_THD` at its positions, half-split; as it is where the layer doesn't rotate."""
    if group.rotary.key_state is KeyState.NONE:
        return x_THD
    return turned_THD(x_THD, replace(group.rotary, stored_lane_order=LaneOrder.HALF_SPLIT), positions)


def _projected(group: LayerGroup, seed: int, layer: int, x_TE: torch.Tensor) -> list[torch.Tensor]:
    widths = {"q": group.key_dim, "k": group.key_dim, "v": group.value_dim}
    return [
        (x_TE @ weights(seed, layer, name, group.kv_heads * width)).view(len(x_TE), group.kv_heads, width)
        for name, width in widths.items()
    ]


def _projected_out(seed: int, layer: int, rows_THD: torch.Tensor) -> torch.Tensor:
    flat = rows_THD.reshape(len(rows_THD), -1)
    return flat @ weights(seed, layer, "o", flat.shape[1]).T


def _attend(
    group: LayerGroup, q_HD: torch.Tensor, k_THD: torch.Tensor, v_THD: torch.Tensor, position: int
) -> torch.Tensor:
    if group.temperature is not None:
        q_HD = q_HD * (1 + group.temperature.parameters[0] * position / 32)
    logits_TH = (k_THD * q_HD).sum(-1) * group.softmax_scale
    if group.softcap is not None:
        logits_TH = group.softcap * torch.tanh(logits_TH / group.softcap)
    first = _first_visible(group, position)
    weights_TH = logits_TH[first:].exp()
    total_H = weights_TH.sum(0) + (torch.tensor(SINK_LOGIT).exp() if group.sinks else 0.0)
    return ((weights_TH / total_H)[..., None] * v_THD[first:]).sum(0)


def _first_visible(group: LayerGroup, position: int) -> int:
    if group.kind is LayerKind.SLIDING and group.window is not None:
        return max(0, position - group.window + 1)
    if group.kind is LayerKind.CHUNKED and group.window is not None:
        return position // group.window * group.window
    return 0
