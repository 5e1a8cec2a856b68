"""Helm chart, without Helm: values and their schema, names in the templates, and the metrics that they name.

`make containers` renders it: `test_chart_rendered.py`.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import jsonschema_rs
import pytest
import yaml
from blockbuster import BlockBuster
from prometheus_client.parser import text_string_to_metric_families

from staged_pool.runtime.version import VERSION
from tests.deploy.chart_schema import NOT_IN_A_POD, SCHEMA, with_config
from tests.deploy.files import CHART, read_yaml
from tests.deploy.values import FULL_VALUES, WRONG_VALUES, changed
from tests.servers.on_socket import serving

TEMPLATES: Final = sorted((CHART / "templates").iterdir())
MANIFESTS: Final = [path for path in TEMPLATES if path.suffix == ".yaml"]
VALUES: Final[dict[str, Any]] = read_yaml(CHART / "values.yaml")

_ACTION: Final = re.compile(r"\{\{.*?\}\}", re.DOTALL)


def is_valid(values: Any) -> bool:
    return bool(jsonschema_rs.validator_for(json.loads(SCHEMA.read_text())).is_valid(values))


def paths_of(values: dict[str, Any], above: str = "") -> Iterator[str]:
    """Yield the paths of all values, such as `image.tag`."""
    for name, value in values.items():
        yield f"{above}{name}"
        if isinstance(value, dict):
            yield from paths_of(value, f"{above}{name}.")


def test_its_versions_are_those_of_the_package() -> None:
    chart = read_yaml(CHART / "Chart.yaml")
    assert (chart["version"], chart["appVersion"]) == (VERSION, VERSION)


def test_the_schema_knows_the_settings_of_the_server() -> None:
    """`python -m tests.deploy.chart_schema` writes them."""
    schema = json.loads(SCHEMA.read_text())
    assert schema == with_config(schema)
    assert not NOT_IN_A_POD & set(schema["properties"]["config"]["properties"])


def test_the_schema_takes_the_values_of_the_chart() -> None:
    assert is_valid(VALUES)
    assert is_valid(changed(VALUES, FULL_VALUES))


@pytest.mark.parametrize("wrong", WRONG_VALUES, ids=json.dumps)
def test_the_schema_rejects_wrong_values(wrong: dict[str, Any]) -> None:
    assert not is_valid(changed(VALUES, wrong))


def test_each_value_is_in_the_schema_and_each_in_the_schema_has_a_default() -> None:
    def walk(schema: dict[str, Any], values: Any, at: str) -> Iterator[str]:
        if not isinstance(values, dict) or "properties" not in schema:
            return
        assert schema["additionalProperties"] is False, at
        for name, below in schema["properties"].items():
            if name not in values:
                yield f"{at}{name}"
            else:
                yield from walk(below, values[name], f"{at}{name}.")

    schema = json.loads(SCHEMA.read_text())
    missing = [path for path in walk(schema, VALUES, "") if not path.startswith("config.")]
    assert missing == ["global"]


def test_templates_name_values_that_exist() -> None:
    known = set(paths_of(VALUES))
    named: set[str] = set()
    for path in TEMPLATES:
        named |= set(re.findall(r"\.Values\.([A-Za-z.]+[A-Za-z])", path.read_text()))
    assert not {name for name in named if name not in known}


def test_every_value_is_used() -> None:
    text = "\n".join(path.read_text() for path in TEMPLATES)
    for name in VALUES:
        assert re.search(rf'\.Values\.{name}\b|pick \.Values .*"{name}"', text), name


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_templates_are_yaml_around_their_actions(path: Path) -> None:
    """Lines of actions alone are left out, and other actions stand for a word."""
    lines = []
    for line in path.read_text().splitlines():
        if not line.strip() or re.fullmatch(r"\s*(\{\{.*?\}\}\s*)+", line):
            continue
        lines.append(re.sub(_ACTION, "x", line))
    found = yaml.safe_load("\n".join(lines))
    assert {"apiVersion", "kind", "metadata"} <= found.keys()
    opened = re.findall(r"\{\{-?\s*(?:if|with|range|define)\b", path.read_text())
    assert len(opened) == len(re.findall(r"\{\{-?\s*end\b", path.read_text()))


@pytest.mark.anyio
async def test_the_autoscaler_has_gauges_of_the_server(nothing_blocks_the_event_loop: BlockBuster) -> None:
    nothing_blocks_the_event_loop.deactivate()  # metrics of the process read /proc
    async with serving() as served, served.client() as client:
        text = (await client.get("/metrics")).text
    gauges = {family.name for family in text_string_to_metric_families(text) if family.type == "gauge"}
    scaled_by = json.loads(SCHEMA.read_text())["properties"]["autoscaling"]["properties"]["metric"]["enum"]
    assert set(scaled_by) <= gauges
    assert VALUES["autoscaling"]["metric"] in scaled_by


def test_changed_leaves_its_argument() -> None:
    before = copy.deepcopy(VALUES)
    changed(VALUES, {"drain": {"leadSeconds": 9}})
    assert before == VALUES
