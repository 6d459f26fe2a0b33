"""The settings that a rendering's coordinator and workers read: the file, and the variables over it."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from kvpact.config import Config, load_config
from tests.k8s.manifests import Document, only


def settings(found: list[Document], secrets: Mapping[str, str] | None = None) -> Config:
    """As `kvpact up --config` reads them in the pod; `secrets`: variables from Secrets. Raises BadRequest."""
    text = only(found, "ConfigMap", "kvpact-config")["data"]["kvpact.yaml"]
    variables = only(found, "ConfigMap", "kvpact-settings")["data"]
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        file = Path(folder) / "kvpact.yaml"
        file.write_text(text, encoding="utf-8")
        for name, value in (variables | dict(secrets or {})).items():
            patch.setenv(name, value)
        return load_config(file, {})
