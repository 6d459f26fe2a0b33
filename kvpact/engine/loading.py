"""From settings to a model, its contract and its cache that passed the self-check."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from kvpact.contract.contract import Contract
from kvpact.contract.json_file import read_json_object
from kvpact.contract.sources.cache_choice import from_config
from kvpact.contract.sources.huggingface import contract_from_config, override_config, read_config
from kvpact.engine.model import HostedModel
from kvpact.engine.requests import EngineSettings
from kvpact.engine.selfcheck import self_check
from kvpact.engine.weights import check_weights
from kvpact.errors import UnreadableSource
from kvpact.kvcache.paged_cache import TORCH_DTYPES, PagedCache
from kvpact.types import Dtype, KeyState


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A model that is ready to compute."""

    model: HostedModel
    contract: Contract
    cache: PagedCache
    eos_token_ids: frozenset[int]


def load(settings: EngineSettings) -> Loaded:
    """Loads, derives the contract from the same config, takes rotation over and runs the self-check.

    Raises:
        UnreadableSource: the folder or a config fact can't be used.
        SelfCheckFailed: the engine doesn't reproduce the model's own forward.
    """
    if settings.engine.threads is not None:
        torch.set_num_threads(settings.engine.threads)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    check_weights(settings.model_folder)
    config = override_config(read_config(settings.model_folder), settings.override)
    dtype = settings.engine.compute_dtype or default_dtype(config, device)
    contract = contract_from_config(
        config,
        cache=from_config(settings.cache),
        identity=settings.identity,
        context_tokens=settings.max_model_len,
        compute_dtype=dtype,
        name=settings.name or settings.model_folder.name,
        engine=", ".join(f"{package} {version(package)}" for package in ("kvpact", "transformers", "torch")),
    )
    _check_served(contract, settings.model_folder)
    model = HostedModel.load(settings.model_folder, config, TORCH_DTYPES[dtype], device)
    model.take_over_rotation(contract.layer_groups[0].rotary.rotary_dim)
    self_check(model, contract)
    return Loaded(
        model=model,
        contract=contract,
        cache=PagedCache(contract, settings.cache.blocks, device),
        eos_token_ids=eos_token_ids(settings.model_folder, config),
    )


def default_dtype(config: dict[str, Any], device: torch.device) -> Dtype:
    """float32 on CPU, the checkpoint's own on CUDA."""
    if device.type == "cpu":
        return Dtype.FLOAT32
    named = config.get("dtype") or config.get("torch_dtype") or Dtype.FLOAT32
    known = {dtype.value for dtype in TORCH_DTYPES}
    return Dtype(named) if named in known else Dtype.FLOAT32


def eos_token_ids(folder: Path, config: dict[str, Any]) -> frozenset[int]:
    """Tokens that end a sequence: those of generation_config.json where it names any, else of the config.

    Raises:
        UnreadableSource: a file names something that isn't a token id.
    """
    named = _generation_config(folder).get("eos_token_id")
    if named is None:
        named = config.get("eos_token_id")
    listed = named if isinstance(named, list) else [] if named is None else [named]
    for token_id in listed:
        if isinstance(token_id, bool) or not isinstance(token_id, int):
            raise UnreadableSource(
                f"{folder}: eos_token_id is {named!r}, expected token ids",
                source=str(folder),
                key="eos_token_id",
            )
    return frozenset(listed)


def _generation_config(folder: Path) -> dict[str, Any]:
    """generation_config.json, empty where there is none. Raises UnreadableSource."""
    file = folder / "generation_config.json"
    return read_json_object(file) if file.is_file() else {}


def _check_served(contract: Contract, folder: Path) -> None:
    for group in contract.layer_groups:
        rotary = group.rotary
        unserved = {
            "softcap": group.softcap is not None,
            "sinks": group.sinks,
            "temperature": group.temperature is not None,
            "mrope_sections": bool(rotary.mrope_sections),
            "frequency_policy": rotary.key_state is not KeyState.NONE
            and (len(rotary.tables) != 1 or rotary.formula is not None),
        }
        for field, found in unserved.items():
            if found:
                raise UnreadableSource(
                    f"{folder}: layers {list(group.layers)} need {field}, which this engine doesn't serve",
                    source=str(folder),
                    key=field,
                )
