"""One fault for each thing that a rule is there to find, made in the base's objects."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.k8s import kvpact_rules, rules
from tests.k8s.manifests import Document, only
from tests.k8s.rules import Rule

Fault = Callable[[list[Document]], Any]


def cluster(found: list[Document]) -> Document:
    """Spec of the RayCluster."""
    spec: Document = only(found, "RayCluster")["spec"]
    return spec


def head(found: list[Document]) -> Document:
    """Spec of the head's pod."""
    spec: Document = cluster(found)["headGroupSpec"]["template"]["spec"]
    return spec


def group(found: list[Document], place: int = 1) -> Document:
    """The decode group, or another."""
    spec: Document = cluster(found)["workerGroupSpecs"][place]
    return spec


def worker(found: list[Document]) -> Document:
    """Spec of the decode workers' pods."""
    spec: Document = group(found)["template"]["spec"]
    return spec


def change(holder: Document, **keys: Any) -> None:
    """Sets keys; underscores stand for dashes where the mapping has such keys."""
    holder.update({key if key in holder else key.replace("_", "-"): value for key, value in keys.items()})


FAULTS: dict[str, tuple[Rule, Fault]] = {
    "a service's selector": (
        rules.selectors_match,
        lambda found: change(
            only(found, "Service", "kvpact")["spec"]["selector"], **{"ray.io/group": "heads"}
        ),
    ),
    "a budget's selector": (
        rules.selectors_match,
        lambda found: change(
            only(found, "PodDisruptionBudget", "kvpact-decode")["spec"]["selector"]["matchLabels"],
            role="decode",
        ),
    ),
    "a policy's selector": (
        rules.selectors_match,
        lambda found: change(
            only(found, "NetworkPolicy", "decode")["spec"]["podSelector"]["matchLabels"], role="decode"
        ),
    ),
    "a policy's peer": (
        rules.selectors_match,
        lambda found: change(
            only(found, "NetworkPolicy", "decode")["spec"]["ingress"][0]["from"][0]["podSelector"][
                "matchLabels"
            ],
            role="prefill",
        ),
    ),
    "a spread's selector": (
        rules.spread_selects_its_own_pods,
        lambda found: change(
            worker(found)["topologySpreadConstraints"][0]["labelSelector"]["matchLabels"],
            **{"app.kubernetes.io/component": "prefill"},
        ),
    ),
    "no spread": (
        rules.spread_selects_its_own_pods,
        lambda found: worker(found).pop("topologySpreadConstraints"),
    ),
    "a budget in percent": (
        rules.budgets_leave_room,
        lambda found: change(only(found, "PodDisruptionBudget", "kvpact-decode")["spec"], minAvailable="50%"),
    ),
    "a budget that blocks": (
        rules.budgets_leave_room,
        lambda found: change(only(found, "PodDisruptionBudget", "kvpact-decode")["spec"], minAvailable=2),
    ),
    "a latest image": (
        rules.images_are_pinned,
        lambda found: change(worker(found)["containers"][0], image="kvpact:latest"),
    ),
    "an image without a tag": (
        rules.images_are_pinned,
        lambda found: change(worker(found)["initContainers"][0], image="kvpact"),
    ),
    "another Ray": (
        kvpact_rules.ray_is_the_installed_one,
        lambda found: change(cluster(found), rayVersion="2.59.0"),
    ),
    "no memory limit": (
        rules.containers_are_bounded,
        lambda found: head(found)["containers"][1]["resources"]["limits"].pop("memory"),
    ),
    "no CPU request of a gate": (
        rules.containers_are_bounded,
        lambda found: worker(found)["initContainers"][0]["resources"]["requests"].pop("cpu"),
    ),
    "root": (
        rules.containers_are_locked_down,
        lambda found: change(head(found)["securityContext"], runAsUser=0),
    ),
    "a writable root": (
        rules.containers_are_locked_down,
        lambda found: head(found)["containers"][0]["securityContext"].pop("readOnlyRootFilesystem"),
    ),
    "a capability": (
        rules.containers_are_locked_down,
        lambda found: change(
            worker(found)["containers"][0]["securityContext"],
            capabilities={"drop": ["ALL"], "add": ["SYS_PTRACE"]},
        ),
    ),
    "the host's network": (
        rules.containers_are_locked_down,
        lambda found: change(worker(found), hostNetwork=True),
    ),
    "service links": (
        rules.no_service_becomes_a_setting,
        lambda found: head(found).pop("enableServiceLinks"),
    ),
    "a mount without volume": (rules.volumes_are_there, lambda found: worker(found)["volumes"].pop()),
    "a volume without mount": (
        rules.volumes_are_there,
        lambda found: worker(found)["volumes"].append({"name": "more", "emptyDir": {}}),
    ),
    "a config map of another name": (
        rules.volumes_are_there,
        lambda found: change(only(found, "ConfigMap", "kvpact-config")["metadata"], name="kvpact-config"),
    ),
    "a secret's key": (
        rules.volumes_are_there,
        lambda found: worker(found)["volumes"][-1]["secret"]["items"][0].update(key="admin"),
    ),
    "no account": (
        rules.accounts_are_there,
        lambda found: change(only(found, "ServiceAccount", "kvpact-ray")["metadata"], name="ray"),
    ),
    "a name with a dot": (
        rules.names_are_short_and_plain,
        lambda found: change(only(found, "RayCluster")["metadata"], name="kvpact.v1"),
    ),
    "a name that is long": (
        rules.names_are_short_and_plain,
        lambda found: change(only(found, "RayCluster")["metadata"], name="k" * 64),
    ),
    "a group's name": (
        rules.names_are_short_and_plain,
        lambda found: change(group(found), groupName="Decode"),
    ),
    "too many replicas": (kvpact_rules.kuberay_takes_it, lambda found: change(group(found), maxReplicas=1)),
    "no least replicas": (kvpact_rules.kuberay_takes_it, lambda found: group(found).pop("minReplicas")),
    "labels as a parameter": (
        kvpact_rules.kuberay_takes_it,
        lambda found: change(group(found)["rayStartParams"], labels="kvpact-role=decode"),
    ),
    "work on the head": (
        kvpact_rules.kuberay_takes_it,
        lambda found: change(cluster(found)["headGroupSpec"]["rayStartParams"], **{"num-cpus": "1"}),
    ),
    "a token in an old Ray": (
        kvpact_rules.kuberay_takes_it,
        lambda found: change(cluster(found), rayVersion="2.51.0", authOptions={"mode": "token"}),
    ),
    "two kinds of token": (
        kvpact_rules.kuberay_takes_it,
        lambda found: change(
            cluster(found), authOptions={"mode": "token", "secretName": "a", "enableK8sTokenAuth": True}
        ),
    ),
    "more workers than pods": (
        kvpact_rules.workers_are_placed_as_the_settings_say,
        lambda found: change(group(found), replicas=3),
    ),
    "Ray labels of another role": (
        kvpact_rules.workers_are_placed_as_the_settings_say,
        lambda found: change(group(found)["labels"], **{"kvpact-role": "prefill"}),
    ),
    "room for two workers": (
        kvpact_rules.workers_are_placed_as_the_settings_say,
        lambda found: change(group(found)["rayStartParams"], **{"num-cpus": "8"}),
    ),
    "another port": (
        kvpact_rules.ports_are_the_settings,
        lambda found: change(worker(found)["containers"][0]["ports"][0], containerPort=7103),
    ),
    "another port of a service": (
        kvpact_rules.ports_are_the_settings,
        lambda found: change(only(found, "Service", "kvpact")["spec"]["ports"][0], port=80),
    ),
    "a short grace period": (
        kvpact_rules.pods_outlive_their_drain,
        lambda found: change(worker(found), terminationGracePeriodSeconds=60),
    ),
    "readiness that asks for life": (
        kvpact_rules.the_coordinator_is_probed,
        lambda found: change(head(found)["containers"][1]["readinessProbe"]["httpGet"], path="/health"),
    ),
    "a probe over KubeRay's": (
        kvpact_rules.the_coordinator_is_probed,
        lambda found: change(worker(found)["containers"][0], readinessProbe={"grpc": {"port": 7102}}),
    ),
    "no gate": (kvpact_rules.workers_pass_the_gate, lambda found: worker(found).pop("initContainers")),
    "the gate of the other role": (
        kvpact_rules.workers_pass_the_gate,
        lambda found: worker(found)["initContainers"][0]["command"].__setitem__(4, "--role=prefill"),
    ),
    "weights elsewhere": (
        kvpact_rules.weights_are_filled_where_they_are_read,
        lambda found: change(only(found, "ConfigMap", "kvpact-weights")["data"], TARGET="/models/other"),
    ),
}
