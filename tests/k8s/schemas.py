"""Strict checks of single objects against the schemas of Kubernetes, KubeRay and cert-manager, offline."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import yaml

from tests.k8s.manifests import Document, pod_templates

KUBERNETES = ("1.32", "1.37")
"""Oldest and newest version that objects are checked against."""
ANNOTATIONS = ("description", "default", "format", "example")
"""Words of a schema that don't check anything here."""

_TEXT: dict[str, Any] = {"type": "string"}
_ISSUER_REF: dict[str, Any] = {"group": _TEXT, "kind": {"enum": ["Issuer", "ClusterIssuer"]}, "name": _TEXT}
_KEY: dict[str, Any] = {
    "algorithm": {"enum": ["ECDSA", "RSA", "Ed25519"]},
    "size": {"type": "integer"},
    "rotationPolicy": {"enum": ["Always", "Never"]},
}


def _closed(properties: dict[str, Any], *required: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


CERT_MANAGER = {
    "Issuer": _closed({"selfSigned": _closed({}), "ca": _closed({"secretName": _TEXT}, "secretName")}),
    "Certificate": _closed(
        {
            "isCA": {"type": "boolean"},
            "commonName": _TEXT,
            "secretName": _TEXT,
            "dnsNames": {"type": "array", "items": _TEXT},
            "duration": {"type": "string", "pattern": r"^\d+h$"},
            "renewBefore": {"type": "string", "pattern": r"^\d+h$"},
            "usages": {"type": "array", "items": {"enum": ["server auth", "client auth"]}},
            "privateKey": _closed(_KEY, "algorithm"),
            "issuerRef": _closed(_ISSUER_REF, "name"),
        },
        "secretName",
        "issuerRef",
    ),
}
"""Specs of cert-manager.io/v1, as far as the manifests use them."""


class Crds:
    """Schemas of custom resources from a folder of CustomResourceDefinitions."""

    def __init__(self, folder: Path) -> None:
        self._validators: dict[tuple[str, str], jsonschema.Draft202012Validator] = {}
        for file in sorted(folder.glob("*.yaml")):
            crd = yaml.load(file.read_text(encoding="utf-8"), Loader=yaml.CSafeLoader)
            for version in crd["spec"]["versions"]:
                schema = strict(version["schema"]["openAPIV3Schema"])
                schema["properties"]["metadata"] = _closed(
                    {name: {"type": "object"} for name in ("labels", "annotations")}
                    | {"name": _TEXT, "namespace": _TEXT},
                    "name",
                )
                key = (f"{crd['spec']['group']}/{version['name']}", crd["spec"]["names"]["kind"])
                self._validators[key] = jsonschema.Draft202012Validator(schema)

    def know(self, document: Document) -> bool:
        """Whether there is a schema for this kind."""
        return (document["apiVersion"], document["kind"]) in self._validators

    def complaints(self, document: Document) -> list[str]:
        """What the schema refuses."""
        validator = self._validators[document["apiVersion"], document["kind"]]
        return [_said(error) for error in validator.iter_errors(document)]


def strict(schema: Any) -> Any:
    """An OpenAPI schema as JSON schema that takes no key it doesn't name."""
    if isinstance(schema, list):
        return [strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    made = {key: value for key, value in schema.items() if key not in ANNOTATIONS and key[:2] != "x-"}
    for key in ("items", "additionalProperties", "allOf", "anyOf", "oneOf", "not"):
        if key in made:
            made[key] = strict(made[key])
    if "properties" in made:
        made["properties"] = {name: strict(value) for name, value in made["properties"].items()}
        if not schema.get("x-kubernetes-preserve-unknown-fields"):
            made.setdefault("additionalProperties", False)
    return made


def complaints(document: Document, versions: tuple[str, ...] = KUBERNETES) -> list[str]:
    """What can be said of one object without KubeRay's schemas: by its own, or by its pod templates'."""
    if document["apiVersion"].startswith("ray.io/"):
        lifted = _lifted(document)
        return [f"{path}: {each}" for path, pod in lifted for each in _core_complaints(_text(pod), versions)]
    if document["apiVersion"] == "cert-manager.io/v1":
        validator = jsonschema.Draft202012Validator(CERT_MANAGER[document["kind"]])
        return [_said(error) for error in validator.iter_errors(document["spec"])]
    return list(_core_complaints(_text(document), versions))


def oldest_complaints(document: Document) -> list[str]:
    """As `complaints`, of the oldest Kubernetes version alone."""
    return complaints(document, KUBERNETES[:1])


def _lifted(document: Document) -> Iterator[tuple[str, Document]]:
    """The pod templates of an object as pods."""
    for path, template in pod_templates(document["spec"]):
        extra = sorted(set(template) - {"metadata", "spec"})
        assert not extra, f"{path} holds {', '.join(extra)}; a pod template has metadata and spec"
        yield path, {"apiVersion": "v1", "kind": "Pod"} | template


@functools.cache
def _core_complaints(text: str, versions: tuple[str, ...]) -> tuple[str, ...]:
    """Complaints of each Kubernetes version; the same object in several overlays is checked once."""
    document, found = json.loads(text), []
    for version in versions:
        try:
            kubernetes_validate.validate(document, version, strict=True)
        except kubernetes_validate.ValidationError as error:
            found.append(f"Kubernetes {version}: {_said(error)}")
        except kubernetes_validate.SchemaNotFoundError as error:
            found.append(f"Kubernetes {version}: {error.message}")
    return tuple(found)


def _text(document: Document) -> str:
    return json.dumps(document, sort_keys=True)


def _said(error: Any) -> str:
    return f"{'.'.join(str(part) for part in error.path)}: {error.message[:200]}"
