"""The llama of the corpus, written down in float64: two layers, so small that its files can be read by eye.

It shares no code with the engine, so that a mistake there can't hide here. Results are rounded to float32
once; another machine's order of summation changes nothing but, once in a great while, a last bit.

Legend: T tokens, E hidden width, Q query heads, H KV heads, D lanes of a head, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

LAYERS, QUERY_HEADS, KV_HEADS, HEAD_DIM = 2, 4, 2, 16
HIDDEN, INTERMEDIATE, VOCABULARY = 64, 96, 64
NORM_EPS = 1e-5
SCALE = HEAD_DIM**-0.5
Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRows:
    """What one layer computed at every position, the token behind the prompt included."""

    raw_key_THD: Array
    value_THD: Array
    query_TQD: Array
    """Raw."""
    attention_TQD: Array
    """Before the output projection."""


def weights(seed: int = 0) -> dict[str, NDArray[np.float32]]:
    """State dict under transformers' names, float32. RandomState's stream is frozen for good."""
    draw = np.random.RandomState(seed)
    shapes = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN), "lm_head.weight": (VOCABULARY, HIDDEN)}
    for layer in range(LAYERS):
        name = f"model.layers.{layer}."
        shapes[name + "self_attn.q_proj.weight"] = (QUERY_HEADS * HEAD_DIM, HIDDEN)
        shapes[name + "self_attn.k_proj.weight"] = (KV_HEADS * HEAD_DIM, HIDDEN)
        shapes[name + "self_attn.v_proj.weight"] = (KV_HEADS * HEAD_DIM, HIDDEN)
        shapes[name + "self_attn.o_proj.weight"] = (HIDDEN, QUERY_HEADS * HEAD_DIM)
        shapes[name + "mlp.gate_proj.weight"] = (INTERMEDIATE, HIDDEN)
        shapes[name + "mlp.up_proj.weight"] = (INTERMEDIATE, HIDDEN)
        shapes[name + "mlp.down_proj.weight"] = (HIDDEN, INTERMEDIATE)
    made = {name: (0.2 * draw.standard_normal(shape)).astype(np.float32) for name, shape in shapes.items()}
    for layer in range(LAYERS):
        for norm in ("input_layernorm", "post_attention_layernorm"):
            name = f"model.layers.{layer}.{norm}.weight"
            made[name] = (0.5 + draw.random_sample(HIDDEN)).astype(np.float32)
    made["model.norm.weight"] = np.ones(HIDDEN, np.float32)
    return made


def prompt(length: int) -> tuple[int, ...]:
    """A fixed prompt and the token behind it: `length` + 1 ids."""
    return tuple((17 * index * index + 5 * index + 3) % VOCABULARY for index in range(length + 1))


def run(
    inv_freq: tuple[float, ...],
    amplitude: float,
    token_ids: tuple[int, ...],
    windows: tuple[int | None, ...] = (None,) * LAYERS,
) -> list[LayerRows]:
    """Every layer's rows at positions 0, 1, 2 ... of `token_ids`."""
    state = {name: rows.astype(np.float64) for name, rows in weights().items()}
    x_TE = state["model.embed_tokens.weight"][list(token_ids)]
    positions = np.arange(len(token_ids))
    layers = []
    for layer in range(LAYERS):
        name = f"model.layers.{layer}."
        normed_TE = _norm(x_TE, state[name + "input_layernorm.weight"])
        q_TQD, k_THD, v_THD = (
            (normed_TE @ state[f"{name}self_attn.{part}_proj.weight"].T).reshape(len(token_ids), -1, HEAD_DIM)
            for part in "qkv"
        )
        turned_q, turned_k = (turned(x, inv_freq, amplitude, positions) for x in (q_TQD, k_THD))
        out_TQD = _attend(turned_q, turned_k, v_THD, windows[layer])
        layers.append(LayerRows(raw_key_THD=k_THD, value_THD=v_THD, query_TQD=q_TQD, attention_TQD=out_TQD))
        x_TE = x_TE + out_TQD.reshape(len(token_ids), -1) @ state[name + "self_attn.o_proj.weight"].T
        normed_TE = _norm(x_TE, state[name + "post_attention_layernorm.weight"])
        gate = normed_TE @ state[name + "mlp.gate_proj.weight"].T
        up = normed_TE @ state[name + "mlp.up_proj.weight"].T
        x_TE = x_TE + (gate / (1 + np.exp(-gate)) * up) @ state[name + "mlp.down_proj.weight"].T
    return layers


def turned(
    x_TND: Array, inv_freq: tuple[float, ...], amplitude: float, positions: NDArray[np.int64]
) -> Array:
    """Half-split lanes turned by the canonical angle float32(position) * float32(inv_freq)."""
    angle_TR = positions.astype(np.float32)[:, None] * np.asarray(inv_freq, np.float32)
    cos, sin = np.cos(angle_TR.astype(np.float64))[:, None], np.sin(angle_TR.astype(np.float64))[:, None]
    first, second = np.split(x_TND, 2, axis=-1)
    out: Array = amplitude * np.concatenate((first * cos - second * sin, second * cos + first * sin), axis=-1)
    return out


def _attend(q_TQD: Array, k_THD: Array, v_THD: Array, window: int | None) -> Array:
    """Causal attention over the last `window` keys, query heads sharing KV heads in order."""
    groups = QUERY_HEADS // KV_HEADS
    k_TQD, v_TQD = np.repeat(k_THD, groups, axis=1), np.repeat(v_THD, groups, axis=1)
    logits_QTn = np.einsum("tqd,nqd->qtn", q_TQD, k_TQD) * SCALE
    distance_Tn = np.arange(len(q_TQD))[:, None] - np.arange(len(q_TQD))
    visible_Tn = (distance_Tn >= 0) & (distance_Tn < (window or len(q_TQD)))
    logits_QTn = np.where(visible_Tn, logits_QTn, -np.inf)
    weights_QTn = np.exp(logits_QTn - logits_QTn.max(axis=-1, keepdims=True))
    weights_QTn /= weights_QTn.sum(axis=-1, keepdims=True)
    out: Array = np.einsum("qtn,nqd->tqd", weights_QTn, v_TQD)
    return out


def _norm(x_TE: Array, weight_E: Array) -> Array:
    normed: Array = weight_E * x_TE / np.sqrt((x_TE**2).mean(axis=-1, keepdims=True) + NORM_EPS)
    return normed
