"""Every overlay renders, and every object is what its schema says; a typo anywhere is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import CRDS_FOLDER
from tests.k8s.manifests import RENDERED, Document, documents
from tests.k8s.schemas import Crds, complaints, oldest_complaints

FREE = ("labels", "annotations", "data", "matchLabels", "selector", "requests", "limits", "rayStartParams")
"""Mappings whose keys are the author's own."""
WITHOUT_CRDS = "KVPACT_CRDS names no folder with KubeRay's CustomResourceDefinitions"


@pytest.fixture(scope="module")
def crds() -> Crds:
    """Schemas of custom resources; without them the test is skipped."""
    if not CRDS_FOLDER:
        pytest.skip(WITHOUT_CRDS)
    found = Crds(Path(CRDS_FOLDER))
    assert found.know({"apiVersion": "ray.io/v1", "kind": "RayCluster"}), f"{CRDS_FOLDER} has no RayCluster"
    return found


def one_of_each_kind() -> dict[str, Document]:
    """The largest object of each kind that any overlay renders."""
    found: dict[str, Document] = {}
    for document in (each for name in RENDERED for each in documents(name)):
        kept = found.get(document["kind"])
        if kept is None or len(str(kept)) < len(str(document)):
            found[document["kind"]] = document
    return found


KINDS = one_of_each_kind()
CORE = sorted(kind for kind in KINDS if not KINDS[kind]["apiVersion"].startswith("ray.io/"))
RAY = sorted(set(KINDS) - set(CORE))


def typos(node: Any, path: str = "") -> Iterator[tuple[str, dict[str, Any], str]]:
    """Every key whose spelling a schema decides: its path, the mapping that holds it, and the key."""
    if isinstance(node, dict):
        for key in list(node):
            here = f"{path}.{key}"
            if here not in (".apiVersion", ".kind"):
                yield here, node, key
            if key not in FREE:
                yield from typos(node[key], here)
            elif key == "selector" and isinstance(node[key], dict) and "matchLabels" in node[key]:
                yield f"{here}.matchLabels", node[key], "matchLabels"
    elif isinstance(node, list):
        for each in node:
            yield from typos(each, f"{path}[]")


def undetected(document: Document, say: Any, *, below: str = "") -> list[str]:
    """Paths whose key can be misspelt without a complaint; each path is tried once."""
    tried: set[str] = set()
    missed = []
    for path, holder, key in typos(document):
        if path in tried or not path.startswith(below):
            continue
        tried.add(path)
        value = holder.pop(key)
        holder[f"{key}x"] = value
        if not say(document):
            missed.append(path)
        del holder[f"{key}x"]
        holder[key] = value
    assert tried
    return missed


@pytest.mark.parametrize("name", RENDERED)
def test_every_object_passes_its_schema_strictly(name: str) -> None:
    found = {f"{each['kind']} {each['metadata']['name']}": complaints(each) for each in documents(name)}
    assert {key: said for key, said in found.items() if said} == {}


@pytest.mark.parametrize("name", RENDERED)
def test_rays_objects_pass_the_schemas_of_kuberay(name: str, crds: Crds) -> None:
    ours = [each for each in documents(name) if each["apiVersion"].startswith("ray.io/")]
    assert ours
    assert {each["kind"]: said for each in ours if (said := crds.complaints(each))} == {}


@pytest.mark.parametrize("kind", CORE)
def test_a_typo_in_any_key_is_refused(kind: str) -> None:
    document = KINDS[kind]
    below = ".spec" if document["apiVersion"] == "cert-manager.io/v1" else ""
    assert undetected(document, oldest_complaints, below=f"{below}." if below else "") == []


@pytest.mark.parametrize("kind", RAY)
def test_a_typo_in_a_pod_template_is_refused_without_the_schemas_of_kuberay(kind: str) -> None:
    document = KINDS[kind]
    spec = document["spec"].get("rayClusterSpec", document["spec"])
    template = spec["workerGroupSpecs"][0]["template"]
    pod = {"apiVersion": "v1", "kind": "Pod"} | template
    assert undetected(pod, oldest_complaints) == []
    template["spec"]["containers"][0]["imagePulPolicy"] = "Always"
    assert oldest_complaints(document) != []
    del template["spec"]["containers"][0]["imagePulPolicy"]


@pytest.mark.parametrize("kind", RAY)
def test_a_typo_in_rays_objects_is_refused(kind: str, crds: Crds) -> None:
    document = KINDS[kind]
    assert document["kind"] in ("RayCluster", "RayJob")
    assert undetected(document, crds.complaints) == []
