"""Values of the chart that the tests set: a full file, and wrong ones."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, Final

FULL_VALUES: Final[Mapping[str, Any]] = {
    "image": {"repository": "registry.example/pool", "digest": "sha256:" + "0a" * 32, "pullPolicy": "Always"},
    "imagePullSecrets": [{"name": "registry"}],
    "fullnameOverride": "embeddings",
    "replicas": 3,
    "config": {
        "models": [
            {"model": "BAAI/bge-small-en-v1.5", "served-name": "small", "revision": "main", "max-batch-tokens": 4096},
            {
                "model": "/models/rank",
                "served-name": "rank",
                "max-image-pixels": 64_000_000,
                "score-template": 'Query: {query}\nDocument: "{document}" \\ <&> é',
                "score-tokens": "yes,no",
            },
        ],
        "max-requests": 512,
        "max-items": 20_000_000,
        "target-delay": 2.5,
        "access-log": False,
        "memory-limit": "2500M",
        "allow-media-domain": ["example.org", "10.0.0.5"],
        "tenant-header": "X-Tenant",
        "root-path": "/pool",
    },
    "drain": {"leadSeconds": 8, "timeoutSeconds": 120},
    "apiKeys": {"values": ["first-key", 'second"key"#of-two']},
    "adminApiKey": {"existingSecret": "admin"},
    "hubToken": {"existingSecret": "hub", "existingSecretKey": "hf"},
    "cache": {"persistence": {"enabled": True, "accessMode": "ReadWriteMany", "storageClass": "fast", "size": "50Gi"}},
    "resources": {"limits": {"nvidia.com/gpu": 1}},
    "service": {"type": "LoadBalancer", "port": 80, "annotations": {"example.org/a": "b"}},
    "serviceAccount": {"name": "pool", "annotations": {"example.org/role": "reader"}},
    "startupProbe": {"failureThreshold": 360},
    "networkPolicy": {
        "enabled": True,
        "from": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "ingress"}}}],
        "egress": {"rules": [{"to": [{"ipBlock": {"cidr": "10.0.0.5/32"}}], "ports": [{"port": 3128}]}]},
    },
    "podDisruptionBudget": {"maxUnavailable": "25%"},
    "autoscaling": {"enabled": True, "metric": "staged_pool_num_requests_waiting", "averageValue": "20"},
    "serviceMonitor": {"enabled": True, "labels": {"team": "a"}, "keySecret": {"name": "scraper", "key": "key"}},
    "prometheusRule": {"enabled": True, "labels": {"team": "a"}},
    "extraEnv": [{"name": "HTTPS_PROXY", "value": "http://proxy.example:3128"}],
    "extraVolumes": [{"name": "models", "persistentVolumeClaim": {"claimName": "models", "readOnly": True}}],
    "extraVolumeMounts": [{"name": "models", "mountPath": "/models", "readOnly": True}],
    "podAnnotations": {"example.org/c": "d"},
    "podLabels": {"team": "a"},
    "nodeSelector": {"kubernetes.io/arch": "amd64"},
    "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
    "affinity": {"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}},
    "topologySpreadConstraints": [
        {
            "maxSkew": 1,
            "topologyKey": "kubernetes.io/hostname",
            "whenUnsatisfiable": "ScheduleAnyway",
            "labelSelector": {"matchLabels": {"app.kubernetes.io/name": "staged-pool"}},
        }
    ],
    "priorityClassName": "serving",
    "runtimeClassName": "nvidia",
}

WRONG_VALUES: Final[Sequence[dict[str, Any]]] = (
    {"replica": 2},
    {"replicas": "2"},
    {"replicas": -1},
    {"image": {"digest": "latest"}},
    {"image": {"pullPolicy": "Sometimes"}},
    {"image": {"tags": "1"}},
    {"config": {"max-request": 5}},
    {"config": {"max-requests": "5"}},
    {"config": {"max-requests": 0}},
    {"config": {"dtype": "float31"}},
    {"config": {"api-key": ["secret"]}},
    {"networkPolicy": {"enabled": "yes"}},
    {"networkPolicy": {"from": [{"namespace": "ingress"}]}},
    {"networkPolicy": {"egress": {"http": True}}},
    {"config": {"port": 9000}},
    {"config": {"drain-timeout": 60}},
    {"config": {"models": ["a/b"]}},
    {"config": {"models": [{"served-name": "a"}]}},
    {"config": {"models": [{"model": "a/b", "torch-threads": 5}]}},
    {"drain": {"leadSeconds": "5s"}},
    {"drain": {"timeoutSeconds": None}},
    {"apiKeys": {"values": ["# no key"]}},
    {"apiKeys": {"values": ["two words"]}},
    {"apiKeys": {"existingSecret": "Not_a_name"}},
    {"cache": {"persistence": {"size": "much"}}},
    {"cache": {"persistence": {"accessMode": "ReadOnlyMany"}}},
    {"resources": {"limits": {"memory": "4 G"}}},
    {"service": {"type": "Router"}},
    {"service": {"port": 70000}},
    {"readinessProbe": {"path": "/health"}},
    {"podDisruptionBudget": {"maxUnavailable": 0}},
    {"autoscaling": {"metric": "cpu"}},
    {"autoscaling": {"averageValue": "much"}},
    {"serviceMonitor": {"interval": "soon"}},
    {"extraEnv": [{"name": "1A", "value": "b"}]},
    {"extraEnv": [{"value": "b"}]},
    {"extraVolumes": [{"emptyDir": {}}]},
    {"podLabels": {"a": 1}},
)
"""Values that the schema rejects, each beside the chart's own."""


def changed(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return values with changes as Helm merges them: mappings key by key, all else replaced."""
    merged = copy.deepcopy(dict(values))
    for name, change in changes.items():
        below = merged.get(name)
        merged[name] = (
            changed(below, change) if isinstance(below, dict) and isinstance(change, dict) else copy.deepcopy(change)
        )
    return merged
