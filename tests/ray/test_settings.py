"""Settings of an application: models as objects, a mapping, or the file of `staged-pool serve --config`."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("ray", reason="needs the extra `ray`")

from staged_pool.api.config import ServerConfig
from staged_pool.ray import app, build
from staged_pool.ray.options import within
from staged_pool.ray.scaling import TokensPolicy, by_tokens
from staged_pool.ray.settings import read_settings
from staged_pool.runtime.config import EngineConfig
from staged_pool.stages.errors import ConfigError


def test_a_file_and_a_mapping_give_the_settings_of_the_command_line(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("secret\n")
    file = tmp_path / "pool.toml"
    file.write_text(
        f'api-key-file = "{keys}"\nlog-level = "warning"\ndtype = "float32"\n'
        '[[models]]\nmodel = "a/b"\ntarget-delay = 2.5\n[[models]]\nmodel = "c/d"\n'
    )
    mapping = {
        "api-key-file": str(keys),
        "log-level": "warning",
        "dtype": "float32",
        "models": [{"model": "a/b", "target-delay": 2.5}, {"model": "c/d"}],
    }
    settings = read_settings(file)
    assert settings == read_settings(str(file)) == read_settings(mapping)
    first, second = settings.models
    assert (first.model, first.dtype, first.target_delay_s) == ("a/b", "float32", 2.5)
    assert (second.model, second.dtype) == ("c/d", "float32")
    assert settings.server.api_keys == ("secret",)
    assert settings.process.log_level == "warning"


def test_a_named_model_at_the_top_has_its_name() -> None:
    [model] = read_settings({"model": "small=a/b"}).models
    assert (model.model, model.served_name) == ("a/b", "small")


def test_models_as_objects_stay_and_a_folder_has_its_absolute_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path)
    server = ServerConfig(api_keys=("secret",))
    settings = read_settings([EngineConfig(model="mine"), EngineConfig(model="a/b")], server)
    assert [model.model for model in settings.models] == [str(tmp_path / "mine"), "a/b"]
    assert settings.server is server


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"modle": "a/b"}, "config: modle is no setting; did you mean model?"),
        ({"model": "a/b", "dtype": "float9"}, 'config: dtype = "float9": must be one of'),
        ({"model": "a/b", "port": 9000}, "port=9000: a mounted server has no connections"),
        ({"model": "a/b", "batch-dir": "files"}, "batch_dir='files': replicas cannot share"),
        ({"model": "a/b", "backend": "trio"}, "backend='trio': replicas of Ray Serve run on asyncio"),
        ({"model": "a/b", "pipeline": ["x.toml"]}, "pipeline='x.toml': replicas serve models"),
        ("missing.toml", "config='missing.toml': cannot be read"),
        ([], "config: no model"),
    ],
)
def test_what_a_replica_cannot_have_is_named(config: object, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_settings(config)  # type: ignore[arg-type]
    assert message in str(caught.value)


def test_settings_of_http_go_into_a_mapping_themselves() -> None:
    with pytest.raises(ConfigError, match="write its settings into the configuration"):
        read_settings({"model": "a/b"}, ServerConfig())


def test_a_replica_keeps_to_what_ray_has_assigned() -> None:
    model = EngineConfig(model="a/b")
    assigned = within({"CPU": 3.0, "memory": 2e9}, model)
    assert (assigned.torch_threads, assigned.memory_limit_bytes) == (3, 2_000_000_000)
    given = EngineConfig(model="a/b", torch_threads=2, memory_limit_bytes=10**9)
    assert within({"CPU": 3.0, "memory": 2e9}, given) == given
    assert within({"CPU": 0.5}, model) == model


def test_the_policy_asks_for_the_replicas_that_the_tokens_need() -> None:
    busy = SimpleNamespace(aggregated_metrics={"tokens": {"one": 3000.0, "two": 1500.0}})
    assert TokensPolicy(1000)(busy) == (4.5, {})
    assert TokensPolicy(1000)(SimpleNamespace(aggregated_metrics={})) == (0.0, {})


def test_a_target_of_no_tokens_is_an_error() -> None:
    with pytest.raises(ValueError, match="target_tokens=0: must be above 0"):
        by_tokens(0)


def test_the_split_form_is_two_deployments_with_options_of_their_own() -> None:
    built = build({"model": "a/b", "preparers": 3})
    assert (built._bound_deployment.name, built._bound_deployment.num_replicas) == ("preparer", 3)
    given = app(EngineConfig(model="a/b"), preparers={"num_replicas": 4, "max_ongoing_requests": 7}, num_replicas=2)
    preparer, engine = given._bound_deployment, given._bound_deployment.init_args[1]._bound_deployment
    assert (preparer.num_replicas, preparer.max_ongoing_requests) == (4, 7)
    assert (engine.name, engine.num_replicas) == ("engine", 2)
    assert build({"model": "a/b"})._bound_deployment.name == "staged-pool"
