"""Applications of Ray Serve whose replicas are engines with the routes of `staged-pool serve`.

    from ray import serve
    from staged_pool.ray import app

    serve.run(app({"model": "path/to/model"}, num_replicas=2), route_prefix="/")

docs/ray.md has more. It needs the extra `ray`: `pip install 'staged-pool[ray]'`.
"""

from __future__ import annotations

try:
    import ray.serve
except ModuleNotFoundError as error:
    raise ImportError(f"staged_pool.ray needs Ray Serve: pip install 'staged-pool[ray]' ({error})") from error

from staged_pool.ray.deployment import Replica, app, build
from staged_pool.ray.router import DrainTimeRouter
from staged_pool.ray.scaling import by_tokens

__all__ = ["DrainTimeRouter", "Replica", "app", "build", "by_tokens"]

del ray
