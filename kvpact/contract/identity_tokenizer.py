"""What token ids mean: a digest of each id's text and of the merges, whatever file says them.

The cache and the tokens after it hold ids, and text is split into ids once, before any prefill. So two sides
agree if each id stands for the same text; settings of splitting (normaliser, pre-tokeniser, template) aren't
part, and neither are flags of single tokens, which converters between file forms set by guess.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvpact.contract.identity import sha256_of
from kvpact.contract.json_file import TOKENIZER_CAP_BYTES, read_json_object
from kvpact.errors import UnreadableSource

WORD_MARK = "\u2581"
"""What pieces of a sentence-piece vocabulary hold in place of a space."""
FILLER = "[PAD{}]"
"""Text, with its own id in it, of a row that no text becomes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """Text of every token id, and the merges of a byte-level vocabulary in order of rank.

    Made by vocabulary_from, which leaves out ids that stand for nothing.
    """

    texts: Mapping[int, str]
    merges: tuple[tuple[str, str], ...]
    """Empty for pieces with scores: there the order of merges follows from the pieces."""

    def size(self) -> int:
        """One more than the largest token id."""
        return max(self.texts) + 1 if self.texts else 0

    def digest(self) -> bytes:
        """SHA-256 of ids, texts and merges."""
        texts = {str(number): text.replace(WORD_MARK, " ") for number, text in self.texts.items()}
        return sha256_of({"merges": [list(pair) for pair in self.merges], "texts": texts})


def vocabulary_from(texts: Mapping[int, str], merges: Iterable[Any]) -> Vocabulary:
    """The vocabulary of these texts and merges, without rows that converters add up to an embedding's width.

    Raises:
        ValueError: a merge that is no pair.
    """
    kept = {number: text for number, text in texts.items() if text != FILLER.format(number)}
    return Vocabulary(texts=kept, merges=_pairs(merges))


def vocabulary_of(path: Path) -> Vocabulary | None:
    """The vocabulary of a tokenizer.json, the file or its folder; None without one.

    Raises:
        UnreadableSource: the file isn't a JSON object, or holds no vocabulary that can be read.
    """
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        return None
    content = read_json_object(file, TOKENIZER_CAP_BYTES)
    try:
        return _vocabulary(content)
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise UnreadableSource(
            f"{file}: its vocabulary can't be read: {error!r}", source=str(file), key="model"
        ) from error


def tokenizer_digest(path: Path) -> bytes | None:
    """Digest of what token ids mean, from a tokenizer.json or its folder; None without one.

    Raises:
        UnreadableSource: see vocabulary_of.
    """
    vocabulary = vocabulary_of(path)
    return None if vocabulary is None else vocabulary.digest()


def vocabulary_size(path: Path) -> int | None:
    """One more than the largest token id of a tokenizer.json, a file or in a folder; None where unknown."""
    vocabulary = vocabulary_of(path)
    return None if vocabulary is None or not vocabulary.texts else vocabulary.size()


def _pairs(merges: Iterable[Any]) -> tuple[tuple[str, str], ...]:
    """From "left right" or [left, right]."""
    pairs = []
    for merge in merges:
        left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
        pairs.append((str(left), str(right)))
    return tuple(pairs)


def _vocabulary(content: Mapping[str, Any]) -> Vocabulary:
    model = content.get("model") or {}
    stored = model.get("vocab") or {}
    if isinstance(stored, list):
        texts = {number: str(piece[0]) for number, piece in enumerate(stored)}
    else:
        texts = {int(number): text for text, number in stored.items()}
    texts |= {int(token["id"]): str(token["content"]) for token in content.get("added_tokens") or ()}
    by_score = bool(model.get("byte_fallback")) or isinstance(stored, list)
    return vocabulary_from(texts, () if by_score else model.get("merges") or ())
