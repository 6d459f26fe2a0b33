"""What WRITER, READER and MODEL may name on the command line, and how each becomes a contract."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvpact.cli.worker_source import describe_worker, is_address
from kvpact.errors import BadRequest, UnreadableSource

if TYPE_CHECKING:
    from kvpact.contract.contract import Contract
    from kvpact.contract.identity import IdentityDigests
    from kvpact.contract.sources.cache_choice import CacheChoice

CACHE_PREFIX = "cache."
CONTEXT_KEY = "max_model_len"
Identify = Callable[[Mapping[str, Any]], "IdentityDigests | None"]
"""From a config to the digests of the weights beside it; None where there are none beside."""
FILE_SUFFIXES = (".json", ".gguf", ".safetensors")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the caller sets over a source."""

    cache: Mapping[str, Any]
    config: Mapping[str, str]
    context_tokens: int | None
    served_by: str | None = None
    """Server whose rule picks the rotary table; None: kvpact's own."""

    def told(self) -> str:
        """For people: ` with rope_theta=10000, cache.block_size=8`; empty where nothing is set."""
        pairs = dict(self.config)
        if self.context_tokens is not None:
            pairs[CONTEXT_KEY] = str(self.context_tokens)
        pairs |= {CACHE_PREFIX + key: str(value) for key, value in self.cache.items()}
        served = "" if self.served_by is None else f" as {self.served_by} serves it"
        given = ", ".join(f"{key}={value}" for key, value in pairs.items())
        return (f" with {given}" if given else "") + served

    def empty(self) -> bool:
        """Whether nothing is set."""
        return not self.cache and not self.config and self.context_tokens is None and self.served_by is None


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A contract and what a person should know of where it came from."""

    source: str
    contract: Contract
    cache: str
    """Where the form of the cache comes from: default, set, file or worker."""
    warnings: tuple[str, ...]


def parse_settings(flag: str, pairs: Sequence[str], served_by: str | None = None) -> Settings:
    """Settings from key=value texts: `cache.<key>`, max_model_len, or a field of the model's config.

    Raises:
        BadRequest: not key=value, given twice, an unknown cache key or server, or a value that isn't allowed.
    """
    _check_server(served_by)
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
            try:
                cache |= parse_cache_settings(f"{key.removeprefix(CACHE_PREFIX)}={value}")
            except BadRequest as error:
                raise BadRequest(f"{flag}: {error}", param=flag) from error
        elif key == CONTEXT_KEY:
            context_tokens = _context(flag, value)
        else:
            config[key] = value
    return Settings(cache=cache, config=config, context_tokens=context_tokens, served_by=served_by)


def load_source(text: str, settings: Settings, tls: Path | None = None) -> Loaded:
    """The contract that `text` names: a contract file, folder, config.json, GGUF, worker or model's name.

    `tls` is the folder with the certificate to show to workers.

    Raises:
        UnreadableSource: nothing there, or not something a contract comes from.
        BadRequest: a setting that this source can't take.
    """
    path = Path(text)
    try:
        is_folder, is_file = path.is_dir(), path.is_file()
    except (OSError, ValueError) as error:
        raise UnreadableSource(f"{text[:80]}...: neither a path nor a name: {error}", source=text) from error
    if is_folder:
        return _from_folder(text, path, settings)
    if is_file:
        return _from_file(text, path, settings)
    if is_address(text):
        return _from_worker(text, settings, tls)
    if text.startswith(("/", ".", "~")) or text.endswith(FILE_SUFFIXES):
        raise UnreadableSource(f"{text}: no such file or folder", source=text)
    return _from_folder(text, _resolve_model(text), settings)


def _check_server(name: str | None) -> None:
    if name is None:
        return
    from kvpact.contract.sources.served_by import SERVERS

    if name not in SERVERS:
        raise BadRequest(
            f"--served-by {name}: expected {', '.join(SERVERS)}; leave it out for kvpact itself",
            param="--served-by",
        )


def _context(flag: str, value: str) -> int:
    if not value.isascii() or not value.isdigit() or len(value) > 18 or int(value) < 1:
        expected = "a whole number of at least 1"
        raise BadRequest(f"{flag}: {CONTEXT_KEY}: found {value!r}, expected {expected}", param=flag)
    return int(value)


def _from_file(text: str, path: Path, settings: Settings) -> Loaded:
    from kvpact.contract.sources.gguf_file import is_gguf

    if is_gguf(path) or path.suffix == ".gguf":
        return _from_gguf(text, path, settings)
    if path.suffix == ".kvpact":
        raise UnreadableSource(f"{text} is a captured handoff; see it with: kvpact handoff show", source=text)
    values = _read_json(text, path)
    if "layout" in values or "layers" in values:
        return _from_contract_file(text, values, settings)
    return _from_config(text, values, settings, lambda _: None)


def _read_json(text: str, path: Path) -> dict[str, Any]:
    from kvpact.contract.sources.huggingface import read_config

    try:
        return read_config(path)
    except UnreadableSource as error:
        expected = "expected a contract file, a config.json, a GGUF file or a model folder"
        raise UnreadableSource(f"{error}; {expected}", source=text) from error


def _from_contract_file(text: str, values: dict[str, Any], settings: Settings) -> Loaded:
    from kvpact.contract.jsonform import contract_from_json, contract_to_json

    _refuse_settings(text, settings, "a contract file and complete: nothing can be set over it")
    try:
        contract = contract_from_json(values)
    except BadRequest as error:
        raise UnreadableSource(f"{text}: {error}", source=text, key=error.param) from error
    stale = "digest" in values and values["digest"] != contract_to_json(contract)["digest"]
    warnings = (f"{text}: digest isn't that of the fields; the fields are what counts",) if stale else ()
    return Loaded(source=text, contract=contract, cache="file", warnings=warnings)


def _from_worker(text: str, settings: Settings, tls: Path | None) -> Loaded:
    _refuse_settings(text, settings, "a running worker: nothing can be set over what it does")
    description = describe_worker(text, tls)
    return Loaded(
        source=f"{text} ({description.life.worker})",
        contract=description.contract,
        cache="worker",
        warnings=(),
    )


def _from_folder(text: str, path: Path, settings: Settings) -> Loaded:
    from kvpact.contract.identity_model import model_identity
    from kvpact.contract.sources.huggingface import read_config

    if not (path / "config.json").exists():
        raise UnreadableSource(f"{text} isn't a model folder: no config.json in it", source=text)
    return _from_config(text, read_config(path), settings, lambda config: model_identity(path, config))


def _from_gguf(text: str, path: Path, settings: Settings) -> Loaded:
    from kvpact.contract.identity_gguf import gguf_identity
    from kvpact.contract.sources.gguf_config import gguf_config, unread_metadata
    from kvpact.contract.sources.gguf_file import open_gguf

    file = open_gguf(path)
    loaded = _from_config(text, gguf_config(file), settings, lambda config: gguf_identity(file, config))
    warnings = tuple(f"{text}: metadata {key} isn't known to matter or not" for key in unread_metadata(file))
    return replace(loaded, warnings=(*loaded.warnings, *warnings))


def _from_config(text: str, given: Mapping[str, Any], settings: Settings, identify: Identify) -> Loaded:
    from kvpact.contract.identity import NO_IDENTITY
    from kvpact.contract.sources.families import family_of
    from kvpact.contract.sources.function_facts import has_function_rule
    from kvpact.contract.sources.huggingface import contract_from_config, override_config, unread_keys

    config = override_config(given, settings.config)
    warnings = [f"{text}: config key {key} isn't known to matter or not" for key in unread_keys(config)]
    identity = identify(config)
    if identity is not None and not has_function_rule(family_of(config).model_type):
        warnings.append(f"{text}: the weights of {family_of(config).model_type} aren't compared")
    try:
        contract = contract_from_config(
            config,
            cache=_cache_choice(settings),
            identity=identity or NO_IDENTITY,
            context_tokens=settings.context_tokens,
            name=text,
        )
        contract = _as_served(contract, settings)
    except UnreadableSource as error:
        raise UnreadableSource(f"{text}: {error}", source=text, key=error.key) from error
    form = "set" if settings.cache else "default"
    return Loaded(source=text + settings.told(), contract=contract, cache=form, warnings=tuple(warnings))


def _as_served(contract: Contract, settings: Settings) -> Contract:
    if settings.served_by is None:
        return contract
    from kvpact.contract.sources.served_by import apply_served_by

    return apply_served_by(contract, settings.served_by)


def _refuse_settings(text: str, settings: Settings, what: str) -> None:
    if not settings.empty():
        raise BadRequest(
            f"{text} is {what}; leave out --set, --writer-set, --reader-set and --served-by there"
        )


def _cache_choice(settings: Settings) -> CacheChoice:
    from kvpact.contract.sources.cache_choice import choice_from_settings

    return choice_from_settings(settings.cache)


def _resolve_model(text: str) -> Path:
    try:
        from kvpact.engine.weights import resolve_model
    except ImportError as error:
        raise UnreadableSource(
            f"{text}: no such file or folder, and finding a model by name needs the whole package: {error}",
            source=text,
        ) from error
    return Path(resolve_model(text))
