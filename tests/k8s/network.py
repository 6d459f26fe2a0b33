"""Who may reach whom: NetworkPolicies read as Kubernetes reads them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tests.k8s.manifests import Document, of_kind


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """One end of a connection. No labels: somewhere outside the cluster."""

    namespace: str
    labels: Mapping[str, str]
    namespace_labels: Mapping[str, str]


OUTSIDE = End(namespace="", labels={}, namespace_labels={})


def selects(selector: Document, labels: Mapping[str, str]) -> bool:
    """Whether a label selector of `matchLabels` alone fits."""
    assert set(selector) <= {"matchLabels"}, f"{selector}: only matchLabels is understood here"
    return all(labels.get(key) == value for key, value in selector.get("matchLabels", {}).items())


def allowed(found: list[Document], source: End, target: End, port: int, *, protocol: str = "TCP") -> bool:
    """Whether the policies let `source` connect to a port of `target`: its egress and the other's ingress."""
    out = _side(found, "Egress", here=source, there=target, port=port, protocol=protocol)
    return out and _side(found, "Ingress", here=target, there=source, port=port, protocol=protocol)


def _side(found: list[Document], way: str, *, here: End, there: End, port: int, protocol: str) -> bool:
    policies = [
        policy
        for policy in of_kind(found, "NetworkPolicy")
        if policy["metadata"]["namespace"] == here.namespace
        and way in policy["spec"]["policyTypes"]
        and here.labels
        and selects(policy["spec"]["podSelector"], here.labels)
    ]
    if not policies:
        return True
    rules = [rule for policy in policies for rule in policy["spec"].get(way.lower(), [])]
    peers = "from" if way == "Ingress" else "to"
    return any(
        _has_port(rule, port, protocol) and _has_peer(rule.get(peers), there, here.namespace)
        for rule in rules
    )


def _has_port(rule: Document, port: int, protocol: str) -> bool:
    if "ports" not in rule:
        return True
    return any(
        each.get("protocol", "TCP") == protocol and each["port"] <= port <= each.get("endPort", each["port"])
        for each in rule["ports"]
    )


def _has_peer(peers: list[dict[str, Any]] | None, end: End, namespace: str) -> bool:
    if peers is None:
        return True
    return any(_is_peer(peer, end, namespace) for peer in peers)


def _is_peer(peer: dict[str, Any], end: End, namespace: str) -> bool:
    if not end.namespace:
        return False
    inside = (
        selects(peer["namespaceSelector"], end.namespace_labels)
        if "namespaceSelector" in peer
        else end.namespace == namespace
    )
    return inside and selects(peer.get("podSelector", {}), end.labels)
