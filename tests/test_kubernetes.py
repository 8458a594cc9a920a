"""The KubeRay manifest against schemas: pods by those of Kubernetes, the rest by KubeRay's types (ray.io/v1)."""

import copy
import shlex

import jsonschema
import kubernetes_validate
import pytest
import yaml

from tests.slurm.conftest import ROOT
from unirl.config.command import load_config

KUBERNETES = "1.31"
POD_TEMPLATE = {"type": "object", "required": ["spec"]}
STRINGS = {"type": "object", "additionalProperties": {"type": "string"}}
COUNT = {"type": "integer", "minimum": 0}


def record(required=(), **properties):
    """An object that has these fields and no others."""
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


def one_of(*values):
    return {"enum": list(values)}


HEAD = record(
    ["rayStartParams", "template"],
    rayStartParams=STRINGS,
    template=POD_TEMPLATE,
    serviceType=one_of("ClusterIP", "NodePort", "LoadBalancer"),
    enableIngress={"type": "boolean"},
)
WORKERS = record(
    ["groupName", "minReplicas", "maxReplicas", "rayStartParams", "template"],
    groupName={"type": "string", "pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"},
    replicas=COUNT,
    minReplicas=COUNT,
    maxReplicas=COUNT,
    numOfHosts={"type": "integer", "minimum": 1},
    rayStartParams=STRINGS,
    template=POD_TEMPLATE,
)
CLUSTER = record(
    ["headGroupSpec"],
    rayVersion={"type": "string", "pattern": r"^\d+\.\d+\.\d+$"},
    authOptions=record(mode=one_of("token", "disabled"), secretName={"type": "string"}),
    enableInTreeAutoscaling={"type": "boolean"},
    headGroupSpec=HEAD,
    workerGroupSpecs={"type": "array", "items": WORKERS},
)
RAY_JOB = record(
    ["apiVersion", "kind", "metadata", "spec"],
    apiVersion={"const": "ray.io/v1"},
    kind={"const": "RayJob"},
    metadata={"type": "object", "required": ["name"]},
    spec=record(
        ["entrypoint", "rayClusterSpec"],
        entrypoint={"type": "string"},
        submissionMode=one_of("K8sJobMode", "HTTPMode", "InteractiveMode", "SidecarMode"),
        backoffLimit=COUNT,
        activeDeadlineSeconds={"type": "integer", "minimum": 1},
        shutdownAfterJobFinishes={"type": "boolean"},
        ttlSecondsAfterFinished=COUNT,
        runtimeEnvYAML={"type": "string"},
        suspend={"type": "boolean"},
        submitterPodTemplate=POD_TEMPLATE,
        rayClusterSpec=CLUSTER,
    ),
)


@pytest.fixture
def manifest():
    return yaml.safe_load((ROOT / "examples" / "kubernetes" / "rayjob.yml").read_text())


def groups(manifest):
    cluster = manifest["spec"]["rayClusterSpec"]
    return [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]


def check(manifest):
    """Raises ValidationError, of jsonschema or of kubernetes_validate."""
    jsonschema.Draft202012Validator.check_schema(RAY_JOB)
    jsonschema.validate(manifest, RAY_JOB)
    for group in groups(manifest):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "ray"}, **group["template"]}
        kubernetes_validate.validate(pod, KUBERNETES, strict=True)


def test_manifest_is_valid(manifest):
    check(manifest)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("spec", "entryPoint"), "python"),
        (("spec", "rayClusterSpec", "authOptions", "mode"), "tokens"),
        (("spec", "rayClusterSpec", "headGroupSpec", "rayStartParams", "num-gpus"), 0),
        (("spec", "rayClusterSpec", "headGroupSpec", "template", "spec", "container"), []),
        (("spec", "rayClusterSpec", "headGroupSpec", "template", "spec", "containers"), [{"image": "unnamed"}]),
    ],
)
def test_a_mistake_is_found(manifest, path, value):
    broken = copy.deepcopy(manifest)
    *parents, name = path
    section = broken
    for parent in parents:
        section = section[parent]
    section[name] = value
    with pytest.raises((jsonschema.ValidationError, kubernetes_validate.ValidationError)):
        check(broken)


def test_entrypoint_asks_for_the_gpus_that_the_workers_have(manifest):
    entrypoint = manifest["spec"]["entrypoint"].replace("$RAY_ADDRESS", "10.0.0.1:6379")
    python, option, module, *arguments = shlex.split(entrypoint)
    assert [python, option, module] == ["python", "-m", "unirl.train_ar"]
    config = load_config([*arguments, "--dry-run"])
    gpus = [
        int(container["resources"]["limits"].get("nvidia.com/gpu", 0)) * group.get("replicas", 1)
        for group in groups(manifest)
        for container in group["template"]["spec"]["containers"]
    ]
    assert sum(gpus) == config.num_devices == 64
    assert config.cluster.address == "10.0.0.1:6379"


def test_token_authentication_is_on(manifest):
    assert manifest["spec"]["rayClusterSpec"]["authOptions"] == {"mode": "token"}
