"""Text from tokens that come one by one; a character split over tokens is held until it is whole."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

from tokenizers import Tokenizer

_REPLACEMENT = "\ufffd"


class Detokenizer(Protocol):
    """One sequence. The pieces, joined, are the decoding of all tokens at once."""

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens complete; may be empty."""

    def flush(self) -> str:
        """What is left of a cut character, once, at the end."""


class ByteLevelVocabulary:
    """Bytes of every token of a byte-level tokenizer (GPT-2's alphabet)."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        alphabet = {character: byte for byte, character in enumerate(_byte_alphabet())}
        added = tokenizer.get_added_tokens_decoder()
        self._special = frozenset(token_id for token_id, token in added.items() if token.special)
        self._bytes = {
            token_id: _token_bytes(token, alphabet) for token, token_id in tokenizer.get_vocab(True).items()
        }

    def bytes_of(self, token_id: int, *, skip_special: bool) -> bytes:
        """Bytes of one token; none for a token without text."""
        if skip_special and token_id in self._special:
            return b""
        return self._bytes.get(token_id, b"")


class ByteLevelDetokenizer:
    """Exact and linear: bytes go through an incremental UTF-8 decoder."""

    def __init__(self, vocabulary: ByteLevelVocabulary, *, skip_special: bool) -> None:
        self._vocabulary = vocabulary
        self._skip_special = skip_special
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_ids: Sequence[int]) -> str:
        """See Detokenizer."""
        parts = [
            self._vocabulary.bytes_of(token_id, skip_special=self._skip_special) for token_id in token_ids
        ]
        return self._decoder.decode(b"".join(parts))

    def flush(self) -> str:
        """See Detokenizer."""
        return self._decoder.decode(b"", final=True)


class WindowDetokenizer:
    """For any tokenizer: decodes a window that begins at a whole character before the new tokens.

    `context` are the last prompt tokens: a decoder that strips the first space mustn't take the output for
    a beginning.
    """

    def __init__(self, tokenizer: Tokenizer, context: Sequence[int], *, skip_special: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._window = list(context)
        self._shown = self._decode(self._window)
        if self._shown.endswith(_REPLACEMENT):
            self._window, self._shown = [], ""
        self._known = len(self._window)

    def push(self, token_ids: Sequence[int]) -> str:
        """See Detokenizer."""
        return "".join(self._push_one(token_id) for token_id in token_ids)

    def flush(self) -> str:
        """See Detokenizer."""
        return self._decode(self._window)[len(self._shown) :]

    def _push_one(self, token_id: int) -> str:
        self._window.append(token_id)
        text = self._decode(self._window)
        if len(text) <= len(self._shown) or text.endswith(_REPLACEMENT):
            return ""
        new = text[len(self._shown) :]
        self._window = self._window[self._known :]
        self._known = len(self._window)
        self._shown = self._decode(self._window)
        return new

    def _decode(self, token_ids: list[int]) -> str:
        return (
            str(self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special))
            if token_ids
            else ""
        )


def _token_bytes(token: str, alphabet: dict[str, int]) -> bytes:
    if all(character in alphabet for character in token):
        return bytes(alphabet[character] for character in token)
    return token.encode("utf-8")


def _byte_alphabet() -> list[str]:
    """Character of each byte: printable Latin-1 stands for itself, the rest follows from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(hidden)) for byte in range(0x100)]
