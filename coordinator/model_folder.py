"""What the coordinator reads of a model: tokenizer, chat template, sizes. No weights."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from tokenizers import Tokenizer

from coordinator.chat_template import ChatTemplate
from coordinator.detokenize import ByteLevelDetokenizer, ByteLevelVocabulary, Detokenizer, WindowDetokenizer
from kvpact.contract.json_file import read_json_object
from kvpact.errors import BadRequest, UnreadableSource

CONTEXT_FOR_DETOKENIZER = 6
"""Prompt tokens that show a decoder that the text doesn't begin here."""
NORMALIZED_CHARACTERS = 4
"""Characters that a normalizer composes into one, at most."""
_SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ends:
    """Tokens that tokenizer_config.json wants around a text."""

    before: tuple[int, ...]
    after: tuple[int, ...]


class ModelText:
    """Text to tokens and back, for one model. Immutable after construction."""

    def __init__(self, folder: Path, *, max_model_len: int | None = None) -> None:
        """Reads the folder.

        Raises:
            UnreadableSource: a file is missing, can't be read, or lacks a number.
            BadRequest: `max_model_len` is above what the model has.
        """
        config = _read_json(folder, "config.json")
        settings = _read_json(folder, "tokenizer_config.json", needed=False)
        self._tokenizer = _read_tokenizer(folder)
        self._special = {name: text for name in _SPECIAL if (text := _token_text(settings.get(name)))}
        self._ends = self._find_ends(settings)  # None: tokenizer.json's own post-processor decides
        self._template = _read_template(folder, settings, self._special)
        self._byte_level = ByteLevelVocabulary(self._tokenizer) if _is_byte_level(self._tokenizer) else None
        tokens = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocabulary = min(_vocabulary(config), max(tokens.values(), default=0) + 1)
        """Token ids are in [0, vocabulary): those that the model has rows for and the tokenizer knows."""
        self.context = _context(config, max_model_len)
        """Prompt and output tokens of one request, at most."""
        self.characters_per_token = max(map(len, tokens), default=1) * (
            1 if self._tokenizer.normalizer is None else NORMALIZED_CHARACTERS
        )
        """Characters of a text that one token stands for, at most."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        """Tokens of a text, with the special tokens that transformers would add. Other threads run on."""
        if self._ends is None or not add_special_tokens:
            return self._ids(text, add_special_tokens=add_special_tokens)
        return (*self._ends.before, *self._ids(text, add_special_tokens=False), *self._ends.after)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        variables: Mapping[str, Any],
    ) -> str:
        """Prompt text of a chat.

        Raises:
            BadRequest: the model has no chat template, or its template refuses the messages.
        """
        if self._template is None:
            raise BadRequest("this model has no chat template; use /v1/completions", param="messages")
        return self._template.render(
            messages, add_generation_prompt=add_generation_prompt, variables=variables
        )

    def detokenizer(self, prompt: Sequence[int], *, skip_special: bool) -> Detokenizer:
        """A detokenizer for the output that follows `prompt`."""
        if self._byte_level is not None:
            return ByteLevelDetokenizer(self._byte_level, skip_special=skip_special)
        return WindowDetokenizer(
            self._tokenizer, prompt[-CONTEXT_FOR_DETOKENIZER:], skip_special=skip_special
        )

    def _ids(self, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
        # Unlike `encode`, a batch lets go of the interpreter's lock while it works.
        return tuple(self._tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)[0].ids)

    def _find_ends(self, settings: Mapping[str, Any]) -> _Ends | None:
        if "add_bos_token" not in settings and "add_eos_token" not in settings:
            return None
        return _Ends(
            before=self._special_id("bos_token") if settings.get("add_bos_token") else (),
            after=self._special_id("eos_token") if settings.get("add_eos_token") else (),
        )

    def _special_id(self, name: str) -> tuple[int, ...]:
        token_id = self._tokenizer.token_to_id(self._special[name]) if name in self._special else None
        return () if token_id is None else (token_id,)


def _vocabulary(config: Mapping[str, Any]) -> int:
    size = _count(config, "vocab_size")
    if size is None:
        raise UnreadableSource(
            "config.json has no vocab_size; add it", source="config.json", key="vocab_size"
        )
    return size


def _context(config: Mapping[str, Any], max_model_len: int | None) -> int:
    own = _count(config, "max_position_embeddings")
    if own is None:
        if max_model_len is None:
            raise UnreadableSource(
                "config.json has no max_position_embeddings; set max_model_len",
                source="config.json",
                key="max_position_embeddings",
            )
        return max_model_len
    if max_model_len is not None and max_model_len > own:
        raise BadRequest(
            f"max_model_len is {max_model_len}, but the model has {own} positions; set at most {own}",
            param="max_model_len",
        )
    return own if max_model_len is None else max_model_len


def _count(config: Mapping[str, Any], key: str) -> int | None:
    """A number of config.json; None where it is absent. Raises UnreadableSource unless it is 1 or more."""
    found = config.get(key)
    if found is None:
        return None
    if isinstance(found, bool) or not isinstance(found, int) or found < 1:
        raise UnreadableSource(
            f"config.json has {key} {found!r}, expected an integer of 1 or more",
            source="config.json",
            key=key,
        )
    return found


def _read_json(folder: Path, name: str, *, needed: bool = True) -> dict[str, Any]:
    path = folder / name
    return read_json_object(path) if needed or path.is_file() else {}


def _read_tokenizer(folder: Path) -> Tokenizer:
    path = folder / "tokenizer.json"
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises bare Exception
        raise UnreadableSource(
            f"can't read {path}: {error}; save the model with its fast tokenizer", source=str(path)
        ) from error
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def _read_template(
    folder: Path, settings: Mapping[str, Any], special: Mapping[str, str]
) -> ChatTemplate | None:
    path = folder / "chat_template.jinja"
    try:
        source: Any = path.read_text(encoding="utf-8") if path.is_file() else settings.get("chat_template")
        if isinstance(source, list):
            source = {entry["name"]: entry["template"] for entry in source}.get("default")
        if not source:
            return None
        if not isinstance(source, str):
            raise TypeError(f"found a {type(source).__name__}, expected text")
        return ChatTemplate(source, special)
    except (OSError, UnicodeDecodeError, TemplateError, TypeError, KeyError) as error:
        raise UnreadableSource(
            f"can't use the chat template in {folder}: {type(error).__name__}: {error}", source=str(path)
        ) from error


def _token_text(entry: Any) -> str | None:
    """Text of a special token, which is given as text or as an object with `content`."""
    found = entry.get("content") if isinstance(entry, dict) else entry
    return found if isinstance(found, str) else None


def _is_byte_level(tokenizer: Tokenizer) -> bool:
    decoder = json.loads(tokenizer.to_str()).get("decoder") or {}
    return bool(decoder.get("type") == "ByteLevel")
