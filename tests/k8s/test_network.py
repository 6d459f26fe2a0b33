"""NetworkPolicies let through what the deployment needs and nothing else."""

from __future__ import annotations

import pytest

from tests.k8s.manifests import RENDERED, SERVING, Document, documents, of_kind, only, pods, ray_specs
from tests.k8s.network import OUTSIDE, End, allowed
from tests.k8s.settings import settings

SUBMITTER = {"app.kubernetes.io/part-of": "kvpact", "app.kubernetes.io/component": "submitter"}
RAY_PORTS = (
    "node-manager-port",
    "object-manager-port",
    "runtime-env-agent-port",
    "dashboard-agent-grpc-port",
)
OPEN = [
    ("prefill", "decode", "decode"),
    ("coordinator", "decode", "decode"),
    ("coordinator", "prefill", "prefill"),
    ("prefill", "coordinator", "registration"),
    ("decode", "coordinator", "registration"),
    ("prefill", "coordinator", "http"),
    ("decode", "coordinator", "http"),
    ("ingress", "coordinator", "http"),
    ("monitoring", "coordinator", "http"),
    ("monitoring", "decode", "metrics"),
    ("submitter", "coordinator", "dashboard"),
    ("operator", "coordinator", "dashboard"),
]
CLOSED = [
    ("decode", "decode", "decode"),
    ("weights", "decode", "decode"),
    ("submitter", "decode", "decode"),
    ("ingress", "decode", "decode"),
    ("monitoring", "decode", "decode"),
    ("outside", "decode", "decode"),
    ("prefill", "prefill", "prefill"),
    ("decode", "prefill", "prefill"),
    ("ingress", "prefill", "prefill"),
    ("weights", "coordinator", "registration"),
    ("ingress", "coordinator", "registration"),
    ("outside", "coordinator", "registration"),
    ("stranger", "coordinator", "http"),
    ("outside", "coordinator", "http"),
    ("weights", "coordinator", "http"),
    ("prefill", "coordinator", "dashboard"),
    ("decode", "coordinator", "dashboard"),
    ("ingress", "coordinator", "dashboard"),
    ("stranger", "coordinator", "dashboard"),
    ("ingress", "decode", "metrics"),
    ("weights", "coordinator", "gcs"),
    ("submitter", "coordinator", "gcs"),
    ("ingress", "coordinator", "gcs"),
]


def ends(found: list[Document]) -> dict[str, End]:
    """Pods of the rendering by component, and some of other namespaces."""
    home = only(found, "Namespace")["metadata"]["name"]
    known = {
        pod.component(): End(namespace=home, labels=pod.labels, namespace_labels={}) for pod in pods(found)
    }
    operator = {"app.kubernetes.io/name": "kuberay-operator"}
    return known | {
        "submitter": End(namespace=home, labels=SUBMITTER, namespace_labels={}),
        "ingress": End(namespace="edge", labels={"a": "b"}, namespace_labels={"kvpact/ingress": "true"}),
        "monitoring": End(namespace="m", labels={"a": "b"}, namespace_labels={"kvpact/monitoring": "true"}),
        "operator": End(namespace="kuberay", labels=operator, namespace_labels={}),
        "stranger": End(namespace="other", labels={"a": "b"}, namespace_labels={}),
        "dns": End(
            namespace="kube-system",
            labels={"k8s-app": "kube-dns"},
            namespace_labels={"kubernetes.io/metadata.name": "kube-system"},
        ),
        "outside": OUTSIDE,
    }


def ports(found: list[Document]) -> dict[str, int]:
    """Ports by what they are for, from the settings."""
    config = settings(found)
    return {
        "http": config.api.port,
        "registration": config.coordinator.port,
        "prefill": config.prefill.port,
        "decode": config.decode.port,
        "metrics": 8080,
        "dashboard": 8265,
        "gcs": 6379,
    }


def let_through(found: list[Document], ways: list[tuple[str, str, str]]) -> list[tuple[str, str, str]]:
    """Those of the connections that the policies allow."""
    known, numbers = ends(found), ports(found)
    return [
        (source, target, port)
        for source, target, port in ways
        if allowed(found, known[source], known[target], numbers[port])
    ]


@pytest.mark.parametrize("name", RENDERED)
def test_what_the_deployment_needs_is_let_through(name: str) -> None:
    assert let_through(documents(name), OPEN) == OPEN


@pytest.mark.parametrize("name", RENDERED)
def test_nothing_else_is_let_through(name: str) -> None:
    assert let_through(documents(name), CLOSED) == []


def test_a_rule_without_peers_is_seen_to_open_the_cache_port() -> None:
    found = documents("base")
    decode = next(each for each in of_kind(found, "NetworkPolicy") if each["metadata"]["name"] == "decode")
    del decode["spec"]["ingress"][0]["from"]
    assert ("outside", "decode", "decode") in let_through(found, CLOSED)


@pytest.mark.parametrize("name", RENDERED)
def test_rays_own_ports_are_open_among_its_pods_alone(name: str) -> None:
    found = documents(name)
    known = ends(found)
    for spec in ray_specs(found):
        for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
            params = group["rayStartParams"]
            wanted = [int(params[key]) for key in RAY_PORTS]
            wanted += [int(params["min-worker-port"]), int(params["max-worker-port"])]
            wanted += [int(params["dashboard-agent-listen-port"]), 6379]
            for port in wanted:
                for source, target in (("coordinator", "decode"), ("prefill", "coordinator")):
                    assert allowed(found, known[source], known[target], port), f"{port} is closed"
                assert not allowed(found, known["ingress"], known["decode"], port), f"{port} is open"
                assert not allowed(found, known["weights"], known["decode"], port), f"{port} is open"


@pytest.mark.parametrize("name", RENDERED)
def test_pods_reach_names_and_only_the_weights_job_reaches_the_internet(name: str) -> None:
    found = documents(name)
    known = ends(found)
    for component in ("coordinator", "prefill", "decode", "weights"):
        assert allowed(found, known[component], known["dns"], 53, protocol="UDP")
        assert allowed(found, known[component], OUTSIDE, 443) is (component == "weights")


def test_kv_ports_lie_outside_what_ray_opens() -> None:
    found = documents("base")
    ray = next(each for each in of_kind(found, "NetworkPolicy") if each["metadata"]["name"] == "ray")
    opened = ray["spec"]["ingress"][0]["ports"]
    ranges = [(each["port"], each.get("endPort", each["port"])) for each in opened]
    kv = [ports(found)[role] for role in ("prefill", "decode", "registration", "http")]
    assert [port for port in kv for low, high in ranges if low <= port <= high] == []


@pytest.mark.parametrize("name", ["default-deny", "ray"])
def test_without_default_deny_strangers_get_in_and_without_rays_rule_ray_does_not(name: str) -> None:
    found = documents(SERVING[0])
    left = [each for each in found if each["kind"] != "NetworkPolicy" or each["metadata"]["name"] != name]
    known = ends(found)
    if name == "ray":
        assert not allowed(left, known["prefill"], known["coordinator"], 6379)
    else:
        unnamed = End(namespace="kvpact", labels={"a": "b"}, namespace_labels={})
        assert allowed(left, known["stranger"], unnamed, 22)
        assert not allowed(found, known["stranger"], unnamed, 22)
