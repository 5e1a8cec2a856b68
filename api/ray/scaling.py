"""Policy of Ray Serve's autoscaler: replicas by the tokens that their engines have in flight.

Ray pickles this module by value for its controller, so it imports nothing of this package.
"""

from __future__ import annotations

from typing import Any, Final

from ray.serve.config import AutoscalingConfig, AutoscalingPolicy

TOKENS: Final = "tokens"
"""Key of a replica's statistics: tokens that its engines have still to compute."""


class TokensPolicy:
    """Ask for as many replicas as the tokens in flight of all of them need.

    Args:
        target_tokens: Tokens in flight that one replica should have.
    """

    def __init__(self, target_tokens: float) -> None:
        self._target_tokens = target_tokens

    def __call__(self, context: Any) -> tuple[float, dict[str, Any]]:
        """Return the wanted number of replicas, before the bounds, factors and delays of the configuration.

        Args:
            context: Serve's `AutoscalingContext`.
        """
        tokens = sum((context.aggregated_metrics or {}).get(TOKENS, {}).values())
        return tokens / self._target_tokens, {}


def by_tokens(target_tokens: float, **settings: Any) -> AutoscalingConfig:
    """Return an `autoscaling_config` that holds each replica near a number of tokens in flight.

    Args:
        target_tokens: Tokens in flight that one replica should have. More wait longer, and need fewer replicas.
        settings: Other settings of Serve's `AutoscalingConfig`, such as `max_replicas`.

    Raises:
        ValueError: `target_tokens` is not above 0.
    """
    if not target_tokens > 0:
        raise ValueError(f"target_tokens={target_tokens!r}: must be above 0")
    policy = AutoscalingPolicy(policy_function=TokensPolicy, policy_kwargs={"target_tokens": target_tokens})
    return AutoscalingConfig(policy=policy, **settings)
