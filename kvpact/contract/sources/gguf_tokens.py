"""The vocabulary that a GGUF file carries."""

from __future__ import annotations

from kvpact.contract.identity_tokenizer import Vocabulary, vocabulary_from
from kvpact.contract.sources.gguf_file import GgufFile

BYTE_LEVEL = "gpt2"


def gguf_vocabulary(file: GgufFile) -> Vocabulary | None:
    """Text of every token id; None where the file has no tokenizer.

    Raises:
        UnreadableSource: merges that are no pairs.
    """
    texts = file.texts("tokenizer.ggml.tokens")
    if texts is None:
        return None
    by_rank = file.text("tokenizer.ggml.model", None) == BYTE_LEVEL
    try:
        merges = (file.texts("tokenizer.ggml.merges") or ()) if by_rank else ()
        return vocabulary_from(dict(enumerate(texts)), merges)
    except ValueError as error:
        raise file.broken(f"merges can't be read: {error}", "tokenizer.ggml.merges") from error
