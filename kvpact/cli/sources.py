"""What WRITER, READER and MODEL may name on the command line, and how each becomes a contract."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvpact.errors import BadRequest, UnreadableSource

if TYPE_CHECKING:
    from kvpact.contract.contract import Contract
    from kvpact.contract.sources.cache_choice import CacheChoice

CACHE_PREFIX = "cache."
CONTEXT_KEY = "max_model_len"
GGUF_MAGIC = b"GGUF"
FILE_SUFFIXES = (".json", ".gguf", ".safetensors")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the caller sets over a source."""

    cache: Mapping[str, Any]
    config: Mapping[str, str]
    context_tokens: int | None

    def empty(self) -> bool:
        """Whether nothing is set."""
        return not self.cache and not self.config and self.context_tokens is None


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A contract and what a person should know of where it came from."""

    source: str
    contract: Contract
    cache: str
    """Where the form of the cache comes from: default, set, or file."""
    warnings: tuple[str, ...]


def parse_settings(flag: str, pairs: Sequence[str]) -> Settings:
    """Settings from key=value texts: `cache.<key>`, max_model_len, or a field of the model's config.

    Raises:
        BadRequest: not key=value, given twice, an unknown cache key, or a value that isn't allowed.
    """
    from kvpact.contract.sources.cache_choice import parse_cache_settings

    cache: dict[str, Any] = {}
    config: dict[str, str] = {}
    context_tokens: int | None = None
    seen: set[str] = set()
    for pair in pairs:
        key, equals, value = (part.strip() for part in pair.partition("="))
        if not equals or not key:
            raise BadRequest(
                f"{flag}: found {pair!r}, expected key=value, such as rope_theta=10000", param=flag
            )
        if key in seen:
            raise BadRequest(f"{flag}: {key} is given twice; keep one", param=flag)
        seen.add(key)
        if key.startswith(CACHE_PREFIX):
            cache |= parse_cache_settings(f"{key.removeprefix(CACHE_PREFIX)}={value}")
        elif key == CONTEXT_KEY:
            context_tokens = _context(flag, value)
        else:
            config[key] = value
    return Settings(cache=cache, config=config, context_tokens=context_tokens)


def load_source(text: str, settings: Settings) -> Loaded:
    """The contract that `text` names: a contract file, a model folder, a config.json, or a model's name.

    Raises:
        UnreadableSource: nothing there, or not something a contract comes from.
        BadRequest: a setting that this source can't take.
    """
    path = Path(text)
    if path.is_dir():
        return _from_config(text, path, settings, weights=path)
    if path.is_file():
        return _from_file(text, path, settings)
    _refuse_unreadable_name(text)
    folder = _resolve_model(text)
    return _from_config(text, folder, settings, weights=folder)


def _context(flag: str, value: str) -> int:
    if not value.isascii() or not value.isdigit() or int(value) < 1:
        expected = "a whole number of at least 1"
        raise BadRequest(f"{flag}: {CONTEXT_KEY}: found {value!r}, expected {expected}", param=flag)
    return int(value)


def _from_file(text: str, path: Path, settings: Settings) -> Loaded:
    from kvpact.contract.sources.huggingface import read_config

    with path.open("rb") as stream:
        if stream.read(len(GGUF_MAGIC)) == GGUF_MAGIC or path.suffix == ".gguf":
            raise UnreadableSource(
                f"{text} is a GGUF file, which this release can't read a contract from;"
                " give the model's config.json or folder",
                source=text,
            )
    values = read_config(path)
    if "layout" in values or "layers" in values:
        return _from_contract_file(text, values, settings)
    return _from_config(text, path, settings, weights=None)


def _from_contract_file(text: str, values: dict[str, Any], settings: Settings) -> Loaded:
    from kvpact.contract.jsonform import contract_from_json, contract_to_json

    if not settings.empty():
        raise BadRequest(f"{text} is a contract file and complete: nothing can be set over it")
    try:
        contract = contract_from_json(values)
    except BadRequest as error:
        raise UnreadableSource(f"{text}: {error}", source=text, key=error.param) from error
    stale = "digest" in values and values["digest"] != contract_to_json(contract)["digest"]
    warnings = (f"{text}: digest isn't that of the fields; the fields are what counts",) if stale else ()
    return Loaded(source=text, contract=contract, cache="file", warnings=warnings)


def _from_config(text: str, path: Path, settings: Settings, *, weights: Path | None) -> Loaded:
    from kvpact.contract.identity import NO_IDENTITY, model_identity
    from kvpact.contract.sources.huggingface import (
        contract_from_config,
        override_config,
        read_config,
        unread_keys,
    )

    config = override_config(read_config(path), settings.config)
    unread = unread_keys(config)
    try:
        contract = contract_from_config(
            config,
            cache=_cache_choice(settings),
            identity=NO_IDENTITY if weights is None else model_identity(weights, config),
            context_tokens=settings.context_tokens,
            name=text,
        )
    except UnreadableSource as error:
        raise UnreadableSource(f"{text}: {error}", source=text, key=error.key) from error
    warnings = [f"{text}: config key {key} isn't known to matter or not" for key in unread]
    return Loaded(
        source=text, contract=contract, cache="set" if settings.cache else "default", warnings=tuple(warnings)
    )


def _cache_choice(settings: Settings) -> CacheChoice:
    from kvpact.contract.sources.cache_choice import choice_from_settings

    return choice_from_settings(settings.cache)


def _refuse_unreadable_name(text: str) -> None:
    if re.fullmatch(r"(\[[0-9a-fA-F:]+\]|[A-Za-z0-9.-]+):\d+", text):
        raise UnreadableSource(
            f"{text} looks like a worker's address, which this release can't read a contract from;"
            " give a contract file, a model folder or a config.json",
            source=text,
        )
    if text.startswith(("/", ".", "~")) or text.endswith(FILE_SUFFIXES):
        raise UnreadableSource(f"{text}: no such file or folder", source=text)


def _resolve_model(text: str) -> Path:
    try:
        from kvpact.engine.weights import resolve_model
    except ImportError as error:
        raise UnreadableSource(
            f"{text}: no such file or folder, and finding a model by name needs torch: {error}",
            source=text,
        ) from error
    return Path(resolve_model(text))
