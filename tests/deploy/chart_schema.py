"""Schema of the chart's values: its part for the configuration file, made of the settings of the server.

`python -m tests.deploy.chart_schema` writes it into `values.schema.json`. The other parts are written by hand.
"""

from __future__ import annotations

import json
import math
from typing import Any, Final

from staged_pool.api.commands.table import every_setting
from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.settings import SettingField, settings_of
from tests.deploy.files import CHART

SCHEMA: Final = CHART / "values.schema.json"

NOT_IN_A_POD: Final = frozenset(
    (
        *("host", "port", "unix-socket", "quic-port", "tls-cert", "tls-key", "tls-ca"),
        *("api-key", "api-key-file", "admin-api-key"),
        *("drain-lead", "drain-timeout"),
        *("batch-dir", "batch-dir-limit"),
        "model",
    )
)
"""Keys that the chart sets itself, or has no place for: addresses, keys, the drain, files of batches. Models are in
tables, so that a user's values replace the chart's."""


def config_schema() -> dict[str, Any]:
    """Return the schema of the value `config`."""
    rows = {row.key: row for row in every_setting() if row.about.has_flag}
    shared = {key: _schema_of(row) for key, row in sorted(rows.items()) if key not in NOT_IN_A_POD}
    own = {row.key: row for row in settings_of(EngineConfig) if row.about.has_flag and not row.about.shared}
    model = {key: _schema_of(row) for key, row in sorted(own.items())}
    table = {"type": "object", "additionalProperties": False, "required": ["model"], "properties": model}
    properties = {"models": {"type": "array", "items": table}, **shared}
    return {"type": "object", "additionalProperties": False, "properties": properties}


def with_config(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema of the values with the part for the configuration file."""
    return {**schema, "properties": {**schema["properties"], "config": config_schema()}}


def _schema_of(row: SettingField) -> dict[str, Any]:
    found: dict[str, Any] = {"description": row.about.help}
    match row.given_kind:
        case "choice":
            found["enum"] = list(row.choices)
        case "texts":
            found |= {"type": "array", "items": {"type": "string"}}
        case "int" | "float":
            found["type"] = "integer" if row.given_kind == "int" else "number"
            if row.about.unit is None:
                limits = {"minimum": row.about.low, "maximum": row.about.high}
                found |= {name: limit for name, limit in limits.items() if math.isfinite(limit)}
        case "bool":
            found["type"] = "boolean"
        case "text" | "path":
            found["type"] = "string"
    return found


if __name__ == "__main__":
    SCHEMA.write_text(json.dumps(with_config(json.loads(SCHEMA.read_text())), indent=2) + "\n")
