"""What no schema says of this deployment: KubeRay's own rules, and what must agree with the settings."""

from __future__ import annotations

import importlib.metadata

from tests.k8s.manifests import Document, Pod, of_kind, plain_name, pods, ray_specs
from tests.k8s.network import selects
from tests.k8s.rules import Rule
from tests.k8s.settings import settings

TOKEN_AUTH_SINCE, K8S_TOKEN_AUTH_SINCE = (2, 52), (2, 55)


def ray_is_the_installed_one(found: list[Document]) -> list[str]:
    """rayVersion is the release in constraints.txt and in the image."""
    installed = importlib.metadata.version("ray")
    versions = [spec["rayVersion"] for spec in ray_specs(found)]
    return [f"rayVersion {each}, installed is {installed}" for each in versions if each != installed]


def kuberay_takes_it(found: list[Document]) -> list[str]:
    """Rules of KubeRay's controller that its schemas don't hold."""
    complaints = []
    for spec in ray_specs(found):
        complaints += _auth_complaints(spec)
        for group in spec["workerGroupSpecs"]:
            least, count, most = (group.get(key) for key in ("minReplicas", "replicas", "maxReplicas"))
            if None in (least, count, most) or not least <= count <= most:
                complaints.append(f"{group['groupName']}: {least} <= {count} <= {most} replicas")
        for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
            if "labels" in group["rayStartParams"]:
                complaints.append("labels in rayStartParams; they belong beside it")
            if not all(isinstance(value, str) for value in group["rayStartParams"].values()):
                complaints.append("rayStartParams holds something else than text")
        if spec["headGroupSpec"]["rayStartParams"].get("num-cpus") != "0":
            complaints.append("the head runs work; num-cpus must be 0")
    for job in of_kind(found, "RayJob"):
        spec = job["spec"]
        ends = spec.get("shutdownAfterJobFinishes", False)
        if not ends and ("ttlSecondsAfterFinished" in spec or spec.get("suspend")):
            complaints.append("a job that is suspended or has a ttl must shut down after it finishes")
        if "upgradeStrategy" in spec["rayClusterSpec"] or "clusterSelector" in spec:
            complaints.append("a job's own cluster takes no upgradeStrategy and no clusterSelector")
    return complaints


def _auth_complaints(spec: Document) -> list[str]:
    options = spec.get("authOptions", {})
    if options.get("mode") != "token":
        return []
    version = tuple(int(part) for part in spec.get("rayVersion", "0.0").split(".")[:2])
    by_kubernetes = options.get("enableK8sTokenAuth", False)
    complaints = []
    if version < (K8S_TOKEN_AUTH_SINCE if by_kubernetes else TOKEN_AUTH_SINCE):
        complaints.append(f"token authentication isn't in Ray {spec.get('rayVersion')}")
    if by_kubernetes and "secretName" in options:
        complaints.append("authOptions: enableK8sTokenAuth takes no secretName")
    return complaints


def workers_are_placed_as_the_settings_say(found: list[Document]) -> list[str]:
    """Counts, Ray labels, CPUs, GPUs and threads agree between settings and pods; a pod holds one worker."""
    config, complaints = settings(found), []
    counts = {"prefill": config.prefill_workers, "decode": config.decode_workers}
    for group in (group for spec in ray_specs(found) for group in spec["workerGroupSpecs"]):
        role = group["groupName"]
        place = (config.prefill if role == "prefill" else config.decode).ray
        limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
        cpus = float(group["rayStartParams"]["num-cpus"])
        good = {
            "replicas": group["replicas"] == counts[role],
            "labels": place.labels.items() <= group["labels"].items(),
            "num-cpus": place.num_cpus <= cpus < 2 * place.num_cpus,
            "cpu limit": cpus == float(limits["cpu"]),
            "threads": config.engine.threads is not None and config.engine.threads <= cpus,
            "gpus": place.num_gpus == float(limits.get("nvidia.com/gpu", 0)),
        }
        complaints += [f"{role}: {what} and the settings differ" for what, fine in good.items() if not fine]
    return complaints


def ports_are_the_settings(found: list[Document]) -> list[str]:
    """Container and Service ports are those of the settings."""
    config, complaints = settings(found), []
    wanted = {
        "coordinator": {"http": config.api.port, "grpc": config.coordinator.port},
        "prefill": {"grpc": config.prefill.port},
        "decode": {"grpc": config.decode.port},
    }
    known = pods(found)
    for pod in (each for each in known if each.ray):
        open_ports = _ports(pod)
        for name, port in wanted[pod.component()].items():
            alone = pod.component() == "coordinator" and len(pod.spec["containers"]) == 1
            if not alone and open_ports.get(name) != port:
                complaints.append(f"{pod.owner}: {name} is {open_ports.get(name)}, the settings say {port}")
    for service in of_kind(found, "Service"):
        selector = {"matchLabels": service["spec"]["selector"]}
        for pod in (each for each in known if selects(selector, each.labels)):
            for port in service["spec"]["ports"]:
                if _ports(pod).get(port["targetPort"]) != port["port"]:
                    complaints.append(f"Service {service['metadata']['name']}: {port['name']} on {pod.owner}")
        scraped = service["metadata"].get("annotations", {}).get("prometheus.io/port")
        if scraped and int(scraped) not in [port["port"] for port in service["spec"]["ports"]]:
            complaints.append(f"Service {service['metadata']['name']}: scraped on {scraped}")
    return complaints


def _ports(pod: Pod) -> dict[str, int]:
    return {
        port["name"]: port["containerPort"]
        for each in pod.spec["containers"]
        for port in each.get("ports", [])
    }


def pods_outlive_their_drain(found: list[Document]) -> list[str]:
    """The grace period covers the drain and the pause before it."""
    drain_s = settings(found).handoff.drain_s
    complaints = []
    for pod in (each for each in pods(found) if each.ray):
        pauses = [
            each.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
            for each in pod.spec["containers"]
        ]
        grace_s = pod.spec.get("terminationGracePeriodSeconds", 30)
        if grace_s < drain_s + max(pauses) + 10:
            complaints.append(f"{pod.owner}: ended after {grace_s} s, drains for {drain_s:g} s")
    return complaints


def the_coordinator_is_probed(found: list[Document]) -> list[str]:
    """Readiness asks for a pair, liveness for the process; Ray's containers keep KubeRay's own probes."""
    complaints = []
    for pod in (each for each in pods(found) if each.ray):
        for each in pod.spec["containers"]:
            probes = {key: each[key].get("httpGet", {}).get("path") for key in each if key.endswith("Probe")}
            wanted = {"startupProbe": "/health", "livenessProbe": "/health", "readinessProbe": "/ready"}
            if probes != (wanted if each["name"] == "coordinator" else {}):
                complaints.append(f"{pod.owner}, {each['name']}: probes {probes}")
    return complaints


def workers_pass_the_gate(found: list[Document]) -> list[str]:
    """In a cluster that serves, each worker group starts behind the rollout gate of its own role."""
    complaints = []
    for group in (g for each in of_kind(found, "RayCluster") for g in each["spec"]["workerGroupSpecs"]):
        gates = group["template"]["spec"].get("initContainers", [])
        words = gates[0]["command"] if gates else []
        if f"--role={group['groupName']}" not in words or words[:3] != ["kvpact", "contract", "check"]:
            complaints.append(f"{group['groupName']}: {words}")
        elif f"--against-cluster=http://kvpact-coordinator:{settings(found).api.port}" not in words:
            complaints.append(f"{group['groupName']}: asks nobody that is there")
    return complaints


def weights_are_filled_where_they_are_read(found: list[Document]) -> list[str]:
    """The Job's target is the settings' model, below a mount that every Ray pod has."""
    model = settings(found).model
    filled = next(each for each in of_kind(found, "ConfigMap") if plain_name(each) == "kvpact-weights")
    target = filled["data"]["TARGET"]
    complaints = [] if target == model else [f"filled {target}, read {model}"]
    for pod in (each for each in pods(found) if each.ray):
        mounts = [mount["mountPath"] for each in pod.containers() for mount in each["volumeMounts"]]
        if not any(model.startswith(f"{mount}/") for mount in mounts):
            complaints.append(f"{pod.owner}: no volume at {model}")
    return complaints


RULES: tuple[Rule, ...] = (
    ray_is_the_installed_one,
    kuberay_takes_it,
    workers_are_placed_as_the_settings_say,
    ports_are_the_settings,
    pods_outlive_their_drain,
    the_coordinator_is_probed,
    workers_pass_the_gate,
    weights_are_filled_where_they_are_read,
)
