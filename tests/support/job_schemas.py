"""Schemas of jobs for Kubernetes and SkyPilot, and the program that writes them: python -m tests.support.job_schemas
CLONES PYTHON. CLONES is a folder with clones of the repositories in DEFINITIONS, PYTHON the interpreter of an
environment with SkyPilot.

tests/data/job_schemas.json has what the projects publish, without descriptions and defaults. Equal parts (the
definition of a pod is in three of four) are written once. A cluster drops a field that it does not know in silence, so
the schemas here refuse each field that the project does not list.
"""

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from jsonschema import Draft202012Validator
from jsonschema.exceptions import best_match

SCHEMAS = Path(__file__).parents[1] / "data" / "job_schemas.json"
_SKYPILOT = """
import json, sky
from sky.utils import schemas
task = schemas.get_task_schema()
task["properties"]["resources"] = schemas.get_resources_schema()
print(json.dumps([sky.__version__, sky.__commit__, task]))
"""
_APACHE = "Apache-2.0"
_LEFT_OUT = ("$schema", "default", "description", "format")
_SHARED = 120  # characters from which a part that comes twice is written once


@dataclass(frozen=True)
class Definition:
    """Where a project publishes what its jobs may have."""

    repository: str
    tag: str
    commit: str
    path: str


_TRAINER = ("kubeflow/trainer", "v2.3.0", "658725bdae5c7e3a0854d93ac6ff492e109a22ab")
DEFINITIONS = {
    "TrainJob": Definition(*_TRAINER, "manifests/base/crds/trainer.kubeflow.org_trainjobs.yaml"),
    "TrainingRuntime": Definition(*_TRAINER, "manifests/base/crds/trainer.kubeflow.org_trainingruntimes.yaml"),
    "PyTorchJob": Definition(
        *("kubeflow/trainer", "v1.9.4", "4445c12aa62e4345b0c2c6ac9b215a70eca46ed7"),
        "manifests/base/crds/kubeflow.org_pytorchjobs.yaml",
    ),
    "JobSet": Definition(
        *("kubernetes-sigs/jobset", "v0.12.0", "f22e565ac3cc3265c7c45ef67ecffdc689af5d77"),
        "config/components/crd/bases/jobset.x-k8s.io_jobsets.yaml",
    ),
}


def wrong_fields(kind: str, job: dict[str, Any]) -> list[str]:
    """Return what the definition of `kind` refuses in `job`: unknown fields, types, values, and fields that lack."""
    found = json.loads(SCHEMAS.read_text())
    schema = {"$defs": found["$defs"], **found["kinds"][kind]["schema"]}
    # Of "any of these" the nearest alternative's error is told.
    errors = [best_match([error]) or error for error in Draft202012Validator(schema).iter_errors(job)]
    errors.sort(key=lambda error: error.json_path)
    return [f"{error.json_path.removeprefix('$.')}: {error.message}" for error in errors]


def _strict(schema: dict[str, Any]) -> dict[str, Any]:
    """Return `schema` without its words, refusing fields that it does not list."""
    strict: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _LEFT_OUT or key.startswith("x-kubernetes-"):
            continue
        if key == "properties":
            strict[key] = {name: _strict(part) for name, part in value.items()}
        elif isinstance(value, dict):
            strict[key] = _strict(value)
        elif key in ("anyOf", "oneOf", "allOf"):
            strict[key] = [_strict(part) for part in value]
        else:
            strict[key] = value
    if "properties" in schema and "type" in schema and not schema.get("x-kubernetes-preserve-unknown-fields"):
        strict["additionalProperties"] = False
    if "required" in schema:  # a cluster fills in defaults before it looks
        given = (name for name in schema["required"] if "default" not in schema.get("properties", {}).get(name, {}))
        strict["required"] = list(given)
    return strict


def _parts(schema: object) -> Iterator[str]:
    if isinstance(schema, dict):
        if "type" in schema:
            yield json.dumps(schema, sort_keys=True)
        for part in schema.values():
            yield from _parts(part)
    elif isinstance(schema, list):
        for part in schema:
            yield from _parts(part)


def _share(schemas: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return `schemas` with references in place of parts that come twice, and those parts."""
    counts = Counter(part for part in _parts(schemas) if len(part) >= _SHARED)
    names: dict[str, str] = {}
    shared: dict[str, Any] = {}

    def referring(schema: Any, whole: bool = False) -> Any:
        if isinstance(schema, list):
            return [referring(part) for part in schema]
        if not isinstance(schema, dict):
            return schema
        text = json.dumps(schema, sort_keys=True)
        if whole or counts[text] < 2:
            return {key: referring(part) for key, part in schema.items()}
        if text not in names:
            names[text] = f"part{len(names)}"
            shared[names[text]] = referring(schema, whole=True)
        return {"$ref": f"#/$defs/{names[text]}"}

    return {kind: referring(schema) for kind, schema in schemas.items()}, shared


def _of_kubernetes(kind: str, definition: Definition, clones: Path) -> dict[str, Any]:
    """Return the strict schema in a CustomResourceDefinition of a clone: the version that clusters store, no status."""
    clone = clones / definition.repository.partition("/")[2]
    command = ["git", "-C", str(clone), "show", f"{definition.commit}:{definition.path}"]
    spec = yaml.safe_load(subprocess.run(command, capture_output=True, text=True, check=True).stdout)["spec"]
    (version,) = (version for version in spec["versions"] if version["storage"])
    schema = version["schema"]["openAPIV3Schema"]
    schema["properties"].pop("status", None)  # what the cluster writes
    schema["properties"]["apiVersion"] = {"const": f"{spec['group']}/{version['name']}"}
    schema["properties"]["kind"] = {"const": kind}
    return _strict(schema | {"required": ["apiVersion", "kind", "metadata", "spec"]})


def main(clones: Path, python: str) -> None:
    """Write tests/data/job_schemas.json."""
    kinds = {
        kind: {"license": _APACHE, **vars(definition), "schema": _of_kubernetes(kind, definition, clones)}
        for kind, definition in DEFINITIONS.items()
    }
    ran = subprocess.run([python, "-c", _SKYPILOT], capture_output=True, text=True, check=True)
    version, commit, task = json.loads(ran.stdout.splitlines()[-1])
    of_skypilot = Definition("skypilot-org/skypilot", f"v{version}", commit, "sky/utils/schemas.py")
    kinds["SkyPilot"] = {"license": _APACHE, **vars(of_skypilot), "schema": _strict(task)}
    schemas, shared = _share({kind: entry["schema"] for kind, entry in kinds.items()})
    compact = partial(json.dumps, separators=(",", ":"))
    lines = [f"{json.dumps(name)}: {compact(part)}" for name, part in shared.items()]
    of_kinds = [f"{json.dumps(kind)}: {compact(entry | {'schema': schemas[kind]})}" for kind, entry in kinds.items()]
    join = ",\n".join
    SCHEMAS.write_text(f'{{"kinds": {{\n{join(of_kinds)}\n}}, "$defs": {{\n{join(lines)}\n}}}}\n')


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
