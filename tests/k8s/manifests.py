"""The manifests as kustomize renders them, and the pods that Kubernetes and KubeRay make of them."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.repo.tree import ROOT

K8S = ROOT / "k8s"
RENDERED = sorted(str(file.parent.relative_to(K8S)) for file in K8S.rglob("kustomization.yaml"))
"""Folders below k8s/ that can be applied."""
SERVING = [name for name in RENDERED if name != "overlays/batch"]

Document = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pod:
    """One pod template; labels include those that KubeRay adds."""

    owner: str
    namespace: str
    labels: Mapping[str, str]
    spec: Document
    ray: bool
    """Whether its first container is one that KubeRay starts Ray in."""

    def containers(self) -> list[Document]:
        """Init containers first."""
        return [*self.spec.get("initContainers", []), *self.spec["containers"]]

    def component(self) -> str:
        """coordinator, prefill, decode, weights or submitter."""
        return self.labels["app.kubernetes.io/component"]


def documents(name: str) -> list[Document]:
    """Objects of one folder, fresh for each caller."""
    found: list[Document] = json.loads(rendered(name))
    return found


@functools.cache
def rendered(name: str) -> str:
    """What `kubectl kustomize` makes of a folder below k8s/, as a JSON list."""
    command = [str(Path(sys.executable).parent / "kubectl"), "kustomize", str(K8S / name)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.dumps([each for each in yaml.load_all(done.stdout, Loader=yaml.CSafeLoader) if each])


def of_kind(found: list[Document], *kinds: str) -> list[Document]:
    """Objects of these kinds."""
    return [each for each in found if each["kind"] in kinds]


def only(found: list[Document], kind: str, name: str | None = None) -> Document:
    """The one object of a kind, or of a kind and name; a content hash at its end doesn't count."""
    fits = [each for each in of_kind(found, kind) if name is None or plain_name(each) == name]
    assert len(fits) == 1, f"{len(fits)} objects of kind {kind}, name {name}"
    return fits[0]


def plain_name(document: Document) -> str:
    """A name without the hash that kustomize puts at its end."""
    name: str = document["metadata"]["name"]
    head, _, tail = name.rpartition("-")
    hashed = document["kind"] in ("ConfigMap", "Secret") and len(tail) == 10 and head
    return head if hashed else name


def pods(found: list[Document]) -> list[Pod]:
    """Every pod that the objects lead to."""
    return [pod for each in found for pod in _pods_of(each)]


def _pods_of(document: Document) -> Iterator[Pod]:
    name, spec = document["metadata"]["name"], document.get("spec", {})
    where = document["metadata"].get("namespace", "")
    match document["kind"]:
        case "Job":
            yield _pod(f"Job {name}", where, spec["template"], {})
        case "RayCluster":
            yield from _ray_pods(f"RayCluster {name}", where, name, spec)
        case "RayJob":
            yield _pod(f"RayJob {name} submitter", where, spec["submitterPodTemplate"], {})
            yield from _ray_pods(f"RayJob {name}", where, f"{name}-abcde", spec["rayClusterSpec"])


def _ray_pods(owner: str, namespace: str, cluster: str, spec: Document) -> Iterator[Pod]:
    head = spec["headGroupSpec"]
    added = _kuberay_labels(cluster, "head", "headgroup") | head.get("labels", {})
    yield _pod(f"{owner} head", namespace, head["template"], added, ray=True)
    for group in spec["workerGroupSpecs"]:
        added = _kuberay_labels(cluster, "worker", group["groupName"]) | group.get("labels", {})
        yield _pod(f"{owner} {group['groupName']}", namespace, group["template"], added, ray=True)


def _kuberay_labels(cluster: str, node_type: str, group: str) -> dict[str, str]:
    return {
        "ray.io/is-ray-node": "yes",
        "ray.io/cluster": cluster,
        "ray.io/node-type": node_type,
        "ray.io/group": group,
        "ray.io/identifier": f"{cluster}-{node_type}",
        "app.kubernetes.io/name": "kuberay",
        "app.kubernetes.io/created-by": "kuberay-operator",
    }


def _pod(owner: str, namespace: str, template: Document, added: dict[str, str], *, ray: bool = False) -> Pod:
    labels = added | template.get("metadata", {}).get("labels", {})
    return Pod(owner=owner, namespace=namespace, labels=labels, spec=template["spec"], ray=ray)


def ray_specs(found: list[Document]) -> list[Document]:
    """The spec of each Ray cluster, a job's own included."""
    clusters = [each["spec"] for each in of_kind(found, "RayCluster")]
    return clusters + [each["spec"]["rayClusterSpec"] for each in of_kind(found, "RayJob")]


def pod_templates(node: Any, path: str = "") -> Iterator[tuple[str, Document]]:
    """Every pod template anywhere inside an object, with its path."""
    if isinstance(node, dict):
        for key, value in node.items():
            here = f"{path}.{key}"
            spec = value.get("spec") if isinstance(value, dict) else None
            if key in ("template", "submitterPodTemplate") and isinstance(spec, dict):
                yield here, value
            yield from pod_templates(value, here)
    elif isinstance(node, list):
        for index, value in enumerate(node):
            yield from pod_templates(value, f"{path}[{index}]")
