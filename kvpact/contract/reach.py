"""Which cached positions a next token can see: what a handoff must carry, and what prefill must multiply."""

from __future__ import annotations

from kvpact.contract.contract import LayerGroup
from kvpact.types import LayerKind


def first_reachable(group: LayerGroup, prompt_tokens: int) -> int:
    """First position visible to the token at position `prompt_tokens`."""
    match group.kind, group.window:
        case LayerKind.SLIDING, int(window):
            return max(0, prompt_tokens - window + 1)
        case LayerKind.CHUNKED, int(chunk):
            return prompt_tokens // chunk * chunk
        case _:
            return 0


def attended_pairs(group: LayerGroup, prompt_tokens: int) -> int:
    """Pairs of a query and a key that it sees, over a whole prompt from position 0."""
    match group.kind, group.window:
        case LayerKind.SLIDING, int(window):
            return _triangle(min(prompt_tokens, window)) + max(0, prompt_tokens - window) * window
        case LayerKind.CHUNKED, int(chunk):
            whole, rest = divmod(prompt_tokens, chunk)
            return whole * _triangle(chunk) + _triangle(rest)
        case _:
            return _triangle(prompt_tokens)


def _triangle(rows: int) -> int:
    return rows * (rows + 1) // 2
