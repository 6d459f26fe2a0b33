"""`kvpact doctor`: whether the machines of a deployment fit together, before anything starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvpact.cli.flags import ConfigFlag, JsonFlag, ModelFlag
from kvpact.cli.joining import init_ray
from kvpact.cli.output import EXIT_FAILED, console, print_json, progress, reported_errors
from kvpact.config import load_config
from kvpact.errors import Unavailable

if TYPE_CHECKING:
    from kvpact.serving.node_facts import Finding, NodeFacts

DEADLINE_S = 300.0
"""For one node, hashing of the weights included."""
HERE = "this machine"
ADDRESS = (
    "Ray cluster whose nodes are looked at: auto (the one on this node) or host:port. "
    "Default: none, this machine alone."
)
HEADINGS = ("node", "python", "kvpact", "ray", "torch", "cores", "open files", "model")


def doctor(
    *,
    address: Annotated[str | None, typer.Option("--address", metavar="ADDRESS", help=ADDRESS)] = None,
    model: ModelFlag = None,
    config: ConfigFlag = None,
    json_output: JsonFlag = False,
) -> None:
    """Compares Python, packages and the model on every node, and looks at limits, before anything starts.

    Without --address it looks at this machine alone. Exit code 0 without errors, else 1.
    """
    with reported_errors(as_json=json_output):
        from kvpact.handoff.capture_folder import check_capture
        from kvpact.serving.node_facts import Level, judge_nodes

        settings = load_config(config, {} if model is None else {"model": model})
        if address is None:
            check_capture(settings.handoff.capture)
        nodes = [_facts(HERE, settings.model)]
        if address is not None:
            own, remote = _remote_facts(address, settings.model)
            nodes = listed_once(nodes[0], own, remote)
        findings = judge_nodes(nodes)
        if json_output:
            print_json({"nodes": [asdict(node) for node in nodes], "findings": [asdict(f) for f in findings]})
        else:
            _print(nodes, findings)
    if any(finding.level is Level.ERROR for finding in findings):
        raise typer.Exit(EXIT_FAILED)


def _facts(node: str, model: str) -> NodeFacts:
    """Facts of the machine that this runs on."""
    from kvpact.contract.identity_model import model_identity
    from kvpact.contract.sources.huggingface import read_config
    from kvpact.engine.weights import resolve_model
    from kvpact.serving.node_facts import node_facts

    def identify() -> tuple[str, str | None]:
        folder = resolve_model(model)
        digest = model_identity(folder, read_config(folder)).function_digest
        return str(folder), None if digest is None else digest.hex()

    return node_facts(node, identify)


def listed_once(here: NodeFacts, own: str, remote: Sequence[NodeFacts]) -> list[NodeFacts]:
    """Nodes to compare: this machine only once, unless its Ray runs with other packages than this command.

    `own`: the name of this machine among `remote`.
    """

    def content(node: NodeFacts) -> tuple[object, ...]:
        return node.python, node.packages, node.model, node.model_digest

    if any(node.node == own and content(node) == content(here) for node in remote):
        return list(remote)
    return [here, *remote]


def _remote_facts(address: str, model: str) -> tuple[str, list[NodeFacts]]:
    """This machine's name there, and facts of each living node, told by a task on it. Raises Unavailable."""
    import ray
    from ray.exceptions import RayError

    progress(f"asking the nodes of Ray at {address}")
    init_ray(address=address)
    try:
        alive = [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
        here = ray.get_runtime_context().get_node_id()
        own = next((node["NodeManagerAddress"] for node in alive if node["NodeID"] == here), "")
        asked = [_asked(node, model) for node in alive]
        facts: list[NodeFacts] = ray.get(asked, timeout=DEADLINE_S)
    except RayError as error:
        raise Unavailable(f"a node of the Ray cluster gave no answer: {error}") from error
    finally:
        ray.shutdown()
    return own, facts


def _asked(node: dict[str, Any], model: str) -> Any:
    """A task that tells the facts of one node, on that node."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
    task = ray.remote(_facts).options(num_cpus=0, scheduling_strategy=there)
    return task.remote(node["NodeManagerAddress"], model)


def _print(nodes: Sequence[NodeFacts], findings: Sequence[Finding]) -> None:
    from kvpact.cli.columns import show_columns
    from kvpact.serving.node_facts import Level

    show_columns(HEADINGS, [_cells(node) for node in nodes], spare=("open files", "cores"))
    for finding in findings:
        style = "bold red" if finding.level is Level.ERROR else "yellow"
        line = f"{finding.level.value} {finding.node}: {finding.text}"
        console.print(line, style=style, highlight=False, markup=False, soft_wrap=True)
    if not findings:
        console.print("nothing to mend", highlight=False)


def _cells(node: NodeFacts) -> list[str]:
    """One row; what keeps a model from being used is among the findings."""
    packages = [node.packages.get(name, "absent") for name in ("kvpact", "ray", "torch")]
    absent = "not found" if node.model.startswith("not found") else "no digest"
    model = absent if node.model_digest is None else node.model_digest[:12]
    return [node.node, node.python, *packages, str(node.cores), str(node.open_files), model]
