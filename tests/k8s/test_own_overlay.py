"""An overlay made of what k8s/README.md shows renders, in a namespace of its own, and keeps every rule."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import yaml

from tests.k8s import kvpact_rules, rules
from tests.k8s.manifests import K8S, Document, documents, of_kind, only, pods
from tests.k8s.rules import Rule
from tests.k8s.schemas import complaints
from tests.k8s.settings import settings

GREEN = "kvpact-green"


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[Document]:
    """What the overlay renders to."""
    folder = tmp_path_factory.mktemp("overlay")
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(shown(folder)), encoding="utf-8")
    return documents(str(folder))


def shown(folder: Path) -> Document:
    """The README's YAML blocks as one kustomization, with the base where it lies."""
    text = (K8S / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^ *```yaml\n(.*?)^ *```", text, re.MULTILINE | re.DOTALL)
    parts: list[Document] = [yaml.safe_load(block) for block in blocks]
    whole = {key: value for part in parts for key, value in part.items()}
    assert set(whole) == {"resources", "images", "configMapGenerator"}
    return whole | {"namespace": GREEN, "resources": [os.path.relpath(K8S / "base", folder)]}


def test_everything_lies_in_the_overlays_namespace(found: list[Document]) -> None:
    inside = {each["metadata"].get("namespace") for each in found if each["kind"] != "Namespace"}
    assert (inside, only(found, "Namespace")["metadata"]["name"]) == ({GREEN}, GREEN)


def test_every_container_runs_the_registrys_image(found: list[Document]) -> None:
    images = {each["image"].partition(":")[0] for pod in pods(found) for each in pod.containers()}
    assert images == {"registry.example/kvpact"}


def test_the_model_is_served_under_its_name(found: list[Document]) -> None:
    config = settings(found)
    assert (config.model, config.served_name) == ("/models/name", "name")


@pytest.mark.parametrize("rule", [*rules.RULES, *kvpact_rules.RULES], ids=lambda rule: rule.__name__)
def test_a_rule_holds(found: list[Document], rule: Rule) -> None:
    assert rule(found) == []


def test_objects_pass_their_schemas(found: list[Document]) -> None:
    assert of_kind(found, "RayCluster")
    assert [said for each in found for said in complaints(each)] == []
