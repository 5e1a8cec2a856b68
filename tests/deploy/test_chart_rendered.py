"""Helm chart as Helm renders it: manifests by the schemas of Kubernetes, and settings by the server's own reading."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from staged_pool.api.keys import read_keys
from tests.deploy.files import CHART, DEPLOY, SECONDS_AFTER_DRAIN, Settings, read_yaml, settings_of
from tests.deploy.values import FULL_VALUES, WRONG_VALUES

helm = pytest.importorskip("helm_python", reason="Helm is not installed: `make containers` installs it")
kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="`make containers` installs it")

OPERATORS_KINDS: Final = {"ServiceMonitor", "PrometheusRule"}
"""Kinds of the Prometheus operator, which the schemas of Kubernetes do not have."""
OLDEST: Final = "1.25"
"""Oldest Kubernetes that the chart allows."""
DEFAULT_KINDS: Final = ["ConfigMap", "Deployment", "PodDisruptionBudget", "Service", "ServiceAccount"]

each_values = pytest.mark.parametrize("values", [{}, FULL_VALUES], ids=["default", "full"])


def rendered(values: Mapping[str, Any], name: str = "demo") -> dict[str, Any]:
    """Return the manifests by kind; there is one of each."""
    with helm.Chart.load(str(CHART)) as chart:
        texts = chart.render(dict(values), name=name, namespace="prod")
    found: dict[str, Any] = {}
    for path, text in texts.items():
        for document in yaml.safe_load_all(text) if path.endswith(".yaml") else ():
            if document is not None:
                assert document["kind"] not in found, path
                found[document["kind"]] = document
    return found


def pod_of(manifests: Mapping[str, Any]) -> dict[str, Any]:
    pod: dict[str, Any] = manifests["Deployment"]["spec"]["template"]["spec"]
    return pod


def settings_in(manifests: Mapping[str, Any], folder: Path) -> Settings:
    """Return the settings of the container, whose files are laid into `folder`."""
    (container,) = pod_of(manifests)["containers"]
    (entrypoint,) = re.findall(r"^ENTRYPOINT (.*)$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)
    for name, files in (("config", manifests["ConfigMap"]["data"]), ("keys", manifests.get("Secret", {}))):
        (folder / name).mkdir()
        for file, text in files.get("stringData", files if name == "config" else {}).items():
            (folder / name / file).write_text(text)
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounts["config"] == "/etc/staged-pool/config"
    assert mounts.get("keys", "/etc/staged-pool/keys") == "/etc/staged-pool/keys"
    command = [*json.loads(entrypoint), *container["args"]]
    values = {each["name"]: "admin" for each in container.get("env", ()) if each["name"].startswith("STAGED_POOL_")}
    return settings_of([word.replace("/etc/staged-pool", str(folder)) for word in command], values)


def test_helm_finds_no_fault() -> None:
    """An icon is recommended, and there is none."""
    found = helm.lint(str(CHART))
    assert found["errors"] == []
    assert [message["error"] for message in found["messages"]] == ["icon is recommended"]


@pytest.mark.parametrize("version", [OLDEST, kubernetes_validate.latest_version()])
@each_values
def test_manifests_are_those_of_kubernetes(values: Mapping[str, Any], version: str) -> None:
    assert f'kubeVersion: ">={OLDEST}.0-0"' in (CHART / "Chart.yaml").read_text()
    for kind, manifest in rendered(values).items():
        if kind not in OPERATORS_KINDS:
            kubernetes_validate.validate(manifest, version, strict=True)


def test_a_wrong_manifest_is_told() -> None:
    manifest = rendered({})["Deployment"]
    manifest["spec"]["template"]["spec"]["containers"][0]["livenesProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(manifest, OLDEST, strict=True)


def test_kinds_of_the_default_and_of_the_full_values() -> None:
    assert sorted(rendered({})) == DEFAULT_KINDS
    more = [
        "HorizontalPodAutoscaler",
        "NetworkPolicy",
        "PersistentVolumeClaim",
        "PrometheusRule",
        "Secret",
        "ServiceMonitor",
    ]
    assert sorted(rendered(FULL_VALUES)) == sorted([*DEFAULT_KINDS, *more])


def test_the_default_settings_are_those_of_the_server(tmp_path: Path) -> None:
    settings = settings_in(rendered({}), tmp_path)
    assert settings.given == {"host", "port", "drain-lead", "drain-timeout", "model"}
    assert settings["model"] == "sentence-transformers/all-MiniLM-L6-v2"


def test_the_full_settings_are_those_of_the_server(tmp_path: Path) -> None:
    settings = settings_in(rendered(FULL_VALUES), tmp_path)
    config = FULL_VALUES["config"]
    assert {key: settings[key] for key in config if key != "models"} == {
        key: value for key, value in config.items() if key != "models"
    }
    assert [
        {key: model[key] for key in given} for model, given in zip(settings.models, config["models"], strict=True)
    ] == config["models"]
    assert settings["admin-api-key"] == ["(hidden)"]
    assert read_keys(tmp_path / "keys/keys") == FULL_VALUES["apiKeys"]["values"]


@each_values
def test_a_pod_is_killed_after_its_drain(values: Mapping[str, Any], tmp_path: Path) -> None:
    manifests = rendered(values)
    settings = settings_in(manifests, tmp_path)
    assert pod_of(manifests)["terminationGracePeriodSeconds"] == settings.drain_s + SECONDS_AFTER_DRAIN
    assert settings["drain-lead"] > 0


@each_values
def test_probes_ask_the_routes_of_probes(values: Mapping[str, Any]) -> None:
    (container,) = pod_of(rendered(values))["containers"]
    paths = {name: container[f"{name}Probe"]["httpGet"]["path"] for name in ("startup", "readiness", "liveness")}
    assert paths == {"startup": "/ready", "readiness": "/ready", "liveness": "/health"}
    liveness = container["livenessProbe"]
    assert (liveness["periodSeconds"], liveness["failureThreshold"]) == (5, 3)
    assert {container[f"{name}Probe"]["httpGet"]["port"] for name in paths} == {"http"}


@each_values
def test_a_pod_has_no_rights(values: Mapping[str, Any]) -> None:
    pod = pod_of(rendered(values))
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod["containers"][0]["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


@pytest.mark.parametrize("name", ["demo", "staged-pool", "a" * 53])
def test_names_fit_and_selectors_agree(name: str) -> None:
    """A Service named staged-pool would set STAGED_POOL_PORT in pods that have service links."""
    manifests = rendered({"apiKeys": {"values": ["key"]}}, name)
    assert all(len(manifest["metadata"]["name"]) <= 63 for manifest in manifests.values())
    labels = manifests["Deployment"]["spec"]["template"]["metadata"]["labels"]
    for selector in (
        manifests["Deployment"]["spec"]["selector"]["matchLabels"],
        manifests["Service"]["spec"]["selector"],
        manifests["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"],
    ):
        assert selector.items() <= labels.items()
    pod = pod_of(manifests)
    assert pod["enableServiceLinks"] is False
    assert pod["serviceAccountName"] == manifests["ServiceAccount"]["metadata"]["name"]
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert volumes["config"]["configMap"]["name"] == manifests["ConfigMap"]["metadata"]["name"]
    assert volumes["keys"]["secret"]["secretName"] == manifests["Secret"]["metadata"]["name"]


def test_the_autoscaler_sets_the_replicas_alone() -> None:
    manifests = rendered(FULL_VALUES)
    assert "replicas" not in manifests["Deployment"]["spec"]
    assert rendered({"replicas": 3})["Deployment"]["spec"]["replicas"] == 3
    target = manifests["HorizontalPodAutoscaler"]["spec"]["scaleTargetRef"]
    assert (target["kind"], target["name"]) == ("Deployment", manifests["Deployment"]["metadata"]["name"])


def test_a_network_policy_is_there_if_it_is_asked_for_and_is_about_the_pods() -> None:
    assert "NetworkPolicy" not in rendered({})
    manifests = rendered({"networkPolicy": {"enabled": True}})
    policy = manifests["NetworkPolicy"]["spec"]
    labels = manifests["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert policy["podSelector"]["matchLabels"].items() <= labels.items()
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    (rule,) = policy["ingress"]
    assert rule == {"ports": [{"port": "http", "protocol": "TCP"}], "from": [{"podSelector": {}}]}
    (container,) = pod_of(manifests)["containers"]
    assert [port["name"] for port in container["ports"]] == ["http"]


def test_a_network_policy_lets_pods_reach_what_they_need_and_no_credentials_of_the_machine() -> None:
    def egress(**values: object) -> list[Any]:
        found: list[Any] = rendered({"networkPolicy": {"enabled": True, "egress": values}})["NetworkPolicy"]["spec"][
            "egress"
        ]
        return found

    names, https = egress()
    assert [(port["port"], port["protocol"]) for port in names["ports"]] == [(53, "UDP"), (53, "TCP")]
    assert [port["port"] for port in https["ports"]] == [443]
    assert [block["ipBlock"]["except"] for block in https["to"]] == [["169.254.0.0/16"], ["fe80::/10"]]
    assert egress(https=False) == [names]
    assert not egress(dns=False, https=False)
    full = rendered(FULL_VALUES)["NetworkPolicy"]["spec"]
    assert full["ingress"][0]["from"] == FULL_VALUES["networkPolicy"]["from"]
    assert full["egress"] == [names, https, *FULL_VALUES["networkPolicy"]["egress"]["rules"]]


def test_a_change_of_settings_or_keys_makes_new_pods() -> None:
    def checksums(values: Mapping[str, Any]) -> dict[str, str]:
        found = rendered(values)["Deployment"]["spec"]["template"]["metadata"]["annotations"]
        return {name: value for name, value in found.items() if name.startswith("checksum/")}

    before = checksums({})
    with_setting = checksums({"config": {"max-requests": 5}})
    with_key = checksums({"apiKeys": {"values": ["key"]}})
    assert [name for name in before if before[name] != with_setting[name]] == ["checksum/config"]
    assert [name for name in before if before[name] != with_key[name]] == ["checksum/api-keys"]


def test_a_claim_of_one_pod_has_one_pod() -> None:
    one = {"cache": {"persistence": {"enabled": True}}}
    manifests = rendered(one)
    assert manifests["Deployment"]["spec"]["strategy"] == {"type": "Recreate"}
    (claim,) = (volume for volume in pod_of(manifests)["volumes"] if "persistentVolumeClaim" in volume)
    assert claim["persistentVolumeClaim"]["claimName"] == manifests["PersistentVolumeClaim"]["metadata"]["name"]
    existing = rendered({"cache": {"persistence": {"enabled": True, "existingClaim": "mine"}}})
    assert "PersistentVolumeClaim" not in existing
    assert "strategy" not in rendered(FULL_VALUES)["Deployment"]["spec"]


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"cache": {"persistence": {"enabled": True}}, "replicas": 2}, "ReadWriteOnce, which is for one pod"),
        ({"cache": {"persistence": {"enabled": True}}, "autoscaling": {"enabled": True}}, "is for one pod"),
        ({"apiKeys": {"existingSecret": "a", "values": ["b"]}}, "keep one of them"),
        ({"apiKeys": {"existingSecret": "a"}, "serviceMonitor": {"enabled": True}}, "/metrics asks for a key"),
        ({"autoscaling": {"enabled": True, "minReplicas": 9}}, "is more than autoscaling.maxReplicas"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_values_that_contradict_each_other_are_told(values: dict[str, Any], told: str) -> None:
    with pytest.raises(helm.HelmError, match=re.escape(told)):
        rendered(values)


@pytest.mark.parametrize("wrong", WRONG_VALUES, ids=json.dumps)
def test_helm_rejects_wrong_values(wrong: dict[str, Any]) -> None:
    with pytest.raises(helm.HelmError, match=r"don't meet the specifications of the schema|schema"):
        rendered(wrong)


def test_the_scraper_has_a_key_where_there_are_keys() -> None:
    (endpoint,) = rendered(FULL_VALUES)["ServiceMonitor"]["spec"]["endpoints"]
    assert endpoint["authorization"]["credentials"] == FULL_VALUES["serviceMonitor"]["keySecret"]
    assert endpoint["path"] == "/metrics"
    (port,) = rendered(FULL_VALUES)["Service"]["spec"]["ports"]
    assert endpoint["port"] == port["name"]
    (open_endpoint,) = rendered({"serviceMonitor": {"enabled": True}})["ServiceMonitor"]["spec"]["endpoints"]
    assert "authorization" not in open_endpoint


def test_the_rules_are_the_alerts_of_the_chart() -> None:
    """Helm leaves the braces of Prometheus in them alone."""
    rules = rendered(FULL_VALUES)["PrometheusRule"]["spec"]
    assert rules == read_yaml(CHART / "alerts.yml")
    assert "{{ $labels.instance }}" in json.dumps(rules)
