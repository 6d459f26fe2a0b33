"""From a deployment's settings and a role to a loaded engine."""

from __future__ import annotations

from pathlib import Path

from kvpact.config import Config, RoleConfig
from kvpact.contract.identity_model import model_identity
from kvpact.contract.sources.huggingface import read_config
from kvpact.contract.sources.overrides import override_config
from kvpact.engine.engine import Engine
from kvpact.engine.requests import EngineSettings
from kvpact.engine.weights import resolve_model


def load_engine(config: Config, role: RoleConfig) -> Engine:
    """Loads the model that `config` names with the role's cache and overrides; not started yet.

    Raises:
        UnreadableSource: the model can't be read.
        BadRequest: an override names no field of the model's config.
        SelfCheckFailed: the engine doesn't reproduce the model's own forward.
    """
    folder: Path = resolve_model(config.model)
    overridden = override_config(read_config(folder), role.override)
    settings = EngineSettings(
        model_folder=folder,
        override=role.override,
        cache=role.cache,
        engine=config.engine,
        max_model_len=config.max_model_len,
        identity=model_identity(folder, overridden),
        name=config.served_name or folder.name,
    )
    return Engine.load(settings)
