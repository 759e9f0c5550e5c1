"""`python -m tools.vendor_crds CRD.yaml VERSION TARGET.json`: what tests need of a CustomResourceDefinition.

Pod templates are left out, because tests check them with the schemas of Kubernetes itself, and descriptions too. The
sources are jobset.x-k8s.io_jobsets.yaml of kubernetes-sigs/jobset and ray.io_rayjobs.yaml of ray-project/kuberay, both
under the Apache License 2.0.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import yaml


def cut(schema: Any) -> Any:
    """Without descriptions and pod templates, and closed: a field that is not named is an error."""
    if isinstance(schema, list):
        return [cut(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    properties = schema.get("properties")
    if isinstance(properties, dict):
        if "containers" in properties:  # the specification of a pod
            return {"type": "object"}
        closed = {"additionalProperties": False} if "additionalProperties" not in schema else {}
        fields = {name: cut(one) for name, one in properties.items()}
        rest = {name: cut(one) for name, one in schema.items() if name not in ("properties", "description")}
        return {"properties": fields} | rest | closed
    return {name: cut(one) for name, one in schema.items() if name != "description"}


def main() -> None:
    source, version, target = sys.argv[1:]
    definition = yaml.safe_load(Path(source).read_text())
    (found,) = [one for one in definition["spec"]["versions"] if one["name"] == version]
    schema = cut(found["schema"]["openAPIV3Schema"])
    schema["properties"]["metadata"] = {"type": "object"}
    schema["properties"].pop("status", None)
    Path(target).write_text(json.dumps(schema, sort_keys=True, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
