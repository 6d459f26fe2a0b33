"""What no schema says of any deployment: selectors, bounds, rights, volumes, names."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Callable, Iterator, Mapping

from tests.k8s.manifests import Document, Pod, of_kind, pods, ray_specs
from tests.k8s.network import selects

Rule = Callable[[list[Document]], list[str]]

DNS_1035 = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
DNS_1123 = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
LONGEST_NAME = {"RayCluster": 63, "RayJob": 47, "Service": 63}
VERSION = importlib.metadata.version("kvpact")
TAGS = (VERSION, f"{VERSION}-cuda")
SECRETS = {
    "kvpact-keys": {"api-keys", "admin-keys", "admin-key"},
    "kvpact-ray-token": {"auth_token"},
    "kvpact-tls-coordinator": {"tls.crt", "tls.key", "ca.crt"},
    "kvpact-tls-prefill": {"tls.crt", "tls.key", "ca.crt"},
    "kvpact-tls-decode": {"tls.crt", "tls.key", "ca.crt"},
}
"""Secrets that k8s/README.md tells how to make, and their keys."""
COMES_FROM_OUTSIDE = {"app.kubernetes.io/part-of": "kvpact", "app.kubernetes.io/component": "submitter"}
"""Labels of pods that an overlay may let in and another one, or a person, brings."""


def selectors_match(found: list[Document]) -> list[str]:
    """Services, budgets and policies select some pod; policies also on the other end."""
    known = [pod.labels for pod in pods(found)]
    return [
        f"{where}: no pod has {selector}"
        for where, selector in _selectors(found)
        if not any(selects({"matchLabels": selector}, labels) for labels in known)
        and selector != COMES_FROM_OUTSIDE
    ]


def _selectors(found: list[Document]) -> Iterator[tuple[str, Mapping[str, str]]]:
    for each in found:
        where, spec = f"{each['kind']} {each['metadata']['name']}", each.get("spec", {})
        match each["kind"]:
            case "Service":
                yield where, spec["selector"]
            case "PodDisruptionBudget":
                yield where, spec["selector"]["matchLabels"]
            case "NetworkPolicy":
                yield where, spec["podSelector"].get("matchLabels", {})
                peers = [rule.get(way, []) for rule in spec.get("ingress", []) for way in ("from",)]
                peers += [rule.get("to", []) for rule in spec.get("egress", [])]
                for peer in (peer for rule in peers for peer in rule if "namespaceSelector" not in peer):
                    yield where, peer["podSelector"]["matchLabels"]


def spread_selects_its_own_pods(found: list[Document]) -> list[str]:
    """Workers are spread over nodes, counted by a selector that fits them."""
    complaints = []
    for pod in (each for each in pods(found) if each.component() in ("prefill", "decode")):
        constraints = pod.spec.get("topologySpreadConstraints", [])
        if not constraints:
            complaints.append(f"{pod.owner}: no topologySpreadConstraints")
        for each in constraints:
            if not selects(each["labelSelector"], pod.labels):
                complaints.append(f"{pod.owner}: spread counts pods with {each['labelSelector']}")
    return complaints


def budgets_leave_room(found: list[Document]) -> list[str]:
    """Whole numbers, and at least one pod may go where there is more than one."""
    replicas = {"coordinator": 1}
    for spec in ray_specs(found):
        replicas |= {group["groupName"]: group["replicas"] for group in spec["workerGroupSpecs"]}
    complaints = []
    for each in of_kind(found, "PodDisruptionBudget"):
        spec, name = each["spec"], each["metadata"]["name"]
        component = spec["selector"]["matchLabels"]["app.kubernetes.io/component"]
        if not isinstance(spec.get("minAvailable"), int):
            complaints.append(f"{name}: minAvailable is no whole number")
        elif component != "coordinator" and not spec["minAvailable"] < replicas[component]:
            complaints.append(f"{name}: none of {replicas[component]} may go")
    return complaints


def images_are_pinned(found: list[Document]) -> list[str]:
    """Each container runs the release that these manifests belong to."""
    images = [(pod.owner, each["image"]) for pod in pods(found) for each in pod.containers()]
    return [f"{owner}: {image}" for owner, image in images if image.partition(":")[2] not in TAGS]


def containers_are_bounded(found: list[Document]) -> list[str]:
    """Requests and limits for CPU and memory on each container; memory is reserved in full."""
    complaints = []
    for pod in pods(found):
        for each in pod.containers():
            where, resources = f"{pod.owner}, {each['name']}", each.get("resources", {})
            for part in ("requests", "limits"):
                complaints += [
                    f"{where}: no {part}.{key}"
                    for key in ("cpu", "memory")
                    if key not in resources.get(part, {})
                ]
            if resources.get("requests", {}).get("memory") != resources.get("limits", {}).get("memory"):
                complaints.append(f"{where}: memory is promised beyond what is reserved")
    return complaints


def containers_are_locked_down(found: list[Document]) -> list[str]:
    """Pod Security Standard "restricted", a read-only root, no token of Kubernetes."""
    complaints = []
    for pod in pods(found):
        context = pod.spec.get("securityContext", {})
        good = {
            "runAsNonRoot": context.get("runAsNonRoot") is True and context.get("runAsUser", 0) > 0,
            "seccompProfile": context.get("seccompProfile") == {"type": "RuntimeDefault"},
            "automountServiceAccountToken": pod.spec.get("automountServiceAccountToken") is False,
            "serviceAccountName": pod.spec.get("serviceAccountName", "default") != "default",
            "host namespaces": not any(key.startswith("host") for key in pod.spec),
        }
        for each in pod.containers():
            own = each.get("securityContext", {})
            good |= {
                f"{each['name']} allowPrivilegeEscalation": own.get("allowPrivilegeEscalation") is False,
                f"{each['name']} readOnlyRootFilesystem": own.get("readOnlyRootFilesystem") is True,
                f"{each['name']} capabilities": own.get("capabilities") == {"drop": ["ALL"]},
            }
        complaints += [f"{pod.owner}: {what}" for what, fine in good.items() if not fine]
    return complaints


def no_service_becomes_a_setting(found: list[Document]) -> list[str]:
    """Kubernetes would put Services into KVPACT_... variables, which kvpact refuses as unknown settings."""
    return [
        f"{pod.owner}: enableServiceLinks"
        for pod in pods(found)
        if pod.spec.get("enableServiceLinks") is not False
    ]


def volumes_are_there(found: list[Document]) -> list[str]:
    """Each mount has its volume, each volume is mounted, and what volumes and variables name exists."""
    maps = {each["metadata"]["name"]: each["data"] for each in of_kind(found, "ConfigMap")}
    claims = {each["metadata"]["name"] for each in of_kind(found, "PersistentVolumeClaim")}
    complaints = []
    for pod in pods(found):
        volumes = {each["name"]: each for each in pod.spec.get("volumes", [])}
        mounted = {mount["name"] for each in pod.containers() for mount in each.get("volumeMounts", [])}
        complaints += [f"{pod.owner}: {name} is mounted and isn't there" for name in mounted - set(volumes)]
        complaints += [f"{pod.owner}: {name} is never mounted" for name in set(volumes) - mounted]
        for kind, name, key in _named(pod, volumes):
            held = maps.get(name) if kind == "ConfigMap" else SECRETS.get(name)
            held = {""} if kind == "PersistentVolumeClaim" and name in claims else held
            if held is None or (key and key not in held):
                complaints.append(f"{pod.owner}: {kind} {name} {key}".rstrip() + " doesn't exist")
    return complaints


def _named(pod: Pod, volumes: Mapping[str, Document]) -> Iterator[tuple[str, str, str]]:
    """Kind, name and key of everything that a pod takes from other objects."""
    for volume in volumes.values():
        if "configMap" in volume:
            keys = [each["key"] for each in volume["configMap"].get("items", [])] or [""]
            yield from (("ConfigMap", volume["configMap"]["name"], key) for key in keys)
        if "secret" in volume:
            keys = [each["key"] for each in volume["secret"].get("items", [])] or [""]
            yield from (("Secret", volume["secret"]["secretName"], key) for key in keys)
        if "persistentVolumeClaim" in volume:
            yield "PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"], ""
    for container in pod.containers():
        for each in container.get("env", []):
            if chosen := each.get("valueFrom", {}).get("secretKeyRef"):
                yield "Secret", chosen["name"], chosen["key"]
        for each in container.get("envFrom", []):
            yield "ConfigMap", each["configMapRef"]["name"], ""


def accounts_are_there(found: list[Document]) -> list[str]:
    """Each pod's service account is among the objects."""
    accounts = {each["metadata"]["name"] for each in of_kind(found, "ServiceAccount")}
    named = [(pod.owner, pod.spec.get("serviceAccountName")) for pod in pods(found)]
    return [f"{owner}: {name}" for owner, name in named if name not in accounts]


def names_are_short_and_plain(found: list[Document]) -> list[str]:
    """Names that KubeRay makes more names of, and Services'."""
    complaints = []
    for each in of_kind(found, *LONGEST_NAME):
        name = each["metadata"]["name"]
        if not DNS_1035.fullmatch(name) or len(name) > LONGEST_NAME[each["kind"]]:
            complaints.append(f"{each['kind']} {name}")
    for group in (group for spec in ray_specs(found) for group in spec["workerGroupSpecs"]):
        if not DNS_1123.fullmatch(group["groupName"]):
            complaints.append(f"group {group['groupName']}")
    return complaints


RULES: tuple[Rule, ...] = (
    selectors_match,
    spread_selects_its_own_pods,
    budgets_leave_room,
    images_are_pinned,
    containers_are_bounded,
    containers_are_locked_down,
    no_service_becomes_a_setting,
    volumes_are_there,
    accounts_are_there,
    names_are_short_and_plain,
)
