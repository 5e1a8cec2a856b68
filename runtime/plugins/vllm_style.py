"""Adapter for vLLM's plugins of inputs and outputs (`IOProcessor`), as of vLLM 0.32 and before."""

from __future__ import annotations

import asyncio
import inspect
import io
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

from staged_pool.runtime.plugins.processor import ModelInputs, PluginContext, PluginSetup
from staged_pool.runtime.requests import Image, Output
from staged_pool.stages import foreign_json
from staged_pool.stages.errors import ConfigError, InvalidInput
from staged_pool.stages.foreign_file import BadFile, read_file

_OUTPUTS: Final[Mapping[str, tuple[Output, ...]]] = {
    "plugin": (),
    "embed": (Output.DENSE,),
    "token_embed": (Output.MULTI_VECTOR,),
    "classify": (Output.LABELS,),
    "score": (Output.LABELS,),
    "token_classify": (Output.TOKEN_LABELS,),
}
"""Our outputs by vLLM's pooling tasks. Empty: the first one of the model."""

_CACHES: Final = ("requests_cache", "online_requests")
"""Attributes in which known plugins keep facts about a request, by its id. Those of failed requests stay there."""


class VllmPlugin:
    """Makes a plugin with vLLM's methods one of ours.

    `parse_data`, `pre_process` and `merge_pooling_params` of one request run in one thread call, one request at a time:
    plugins keep state between them. So a `pre_process` that calls `asyncio.run` works. Each request has an id of the
    engine's making. If a plugin has only `pre_process_async` or `post_process_async`, its coroutine gets an event loop
    of its own in that thread.

    Args:
        plugin: The plugin, or its class, which is called with a `vllm_config` and a `renderer`.
        setup: Facts about the engine. None: `plugin` is no class.
        forward: Runs a batch of the plugin's prompts. None: the served model does.
    """

    name = ""

    def __init__(
        self,
        plugin: Any,
        setup: PluginSetup | None = None,
        *,
        forward: Callable[[Sequence[Any]], Sequence[Any]] | None = None,
    ) -> None:
        if isinstance(plugin, type):
            if setup is None:
                raise TypeError("a class of a plugin needs the setup of an engine")
            plugin = plugin(_vllm_config(setup), _Renderer(setup))
        self._plugin = plugin
        self._lock = threading.Lock()
        self._needs_ids = forward is not None
        if forward is not None:
            self.forward = forward

    def preprocess(self, data: Any, context: PluginContext) -> Any:
        """Return the prompts of a request."""
        plugin = self._plugin
        with self._lock:
            if hasattr(plugin, "parse_data"):
                prompt = plugin.parse_data(data)
            else:
                prompt = plugin.parse_request(SimpleNamespace(data=data, request_id=context.id))
            prompts = _call(plugin, "pre_process", prompt=prompt, request_id=context.id)
            task = self._task()
        several = list(prompts) if isinstance(prompts, list | tuple) and not _is_ids(prompts) else [prompts]
        if self._needs_ids:
            return several
        context.state = inputs = [_model_input(each) for each in several]
        return ModelInputs(inputs, _OUTPUTS[task])

    def _task(self) -> str:
        """Return the pooling task that the plugin asks for."""
        for name in ("merge_pooling_params", "validate_or_generate_params"):
            if (method := getattr(self._plugin, name, None)) is not None:
                task = getattr(method(), "task", None) or "plugin"
                if task not in _OUTPUTS:
                    raise ValueError(f"unknown pooling task {task!r}; known: {', '.join(_OUTPUTS)}")
                return str(task)
        return "plugin"

    def postprocess(self, rows: Sequence[Any], context: PluginContext) -> Any:
        """Return the data of the answer."""
        plugin = self._plugin
        output = _call(plugin, "post_process", [_row(row) for row in rows], request_id=context.id)
        if hasattr(plugin, "output_to_response") and not hasattr(plugin, "merge_pooling_params"):  # vLLM before 0.12
            response = plugin.output_to_response(output)
            return getattr(response, "data", response)
        return output

    def release(self, context: PluginContext) -> None:
        """Drop what the plugin keeps of a request."""
        for name in _CACHES:
            if isinstance(cache := getattr(self._plugin, name, None), dict):
                cache.pop(context.id, None)


def _call(plugin: Any, name: str, *args: Any, **named: Any) -> Any:
    """Call a method, or run its `_async` form if there is no other."""
    if (method := getattr(plugin, name, None)) is not None and not getattr(method, "__isabstractmethod__", False):
        return method(*args, **named)
    made = getattr(plugin, f"{name}_async")(*args, **named)
    return asyncio.run(made) if inspect.iscoroutine(made) else made


def _is_ids(prompts: Sequence[Any]) -> bool:
    return bool(prompts) and all(isinstance(each, int) for each in prompts)


def _model_input(prompt: Any) -> Any:
    """Convert a prompt of vLLM to an input of the served model."""
    if isinstance(prompt, str) or (isinstance(prompt, list | tuple) and _is_ids(prompt)):
        return prompt
    if isinstance(prompt, Mapping):
        media = prompt.get("multi_modal_data") or {}
        if set(media) == {"image"} and not isinstance(media["image"], Mapping):
            return _image(media["image"])
        if not media:
            for field in ("prompt_token_ids", "prompt"):
                if prompt.get(field) is not None:
                    return prompt[field]
    kind = type(prompt).__name__
    raise InvalidInput(
        f"prompt of type {kind}: the served model takes a text, token ids or one image. "
        "A plugin whose model reads other tensors needs a forward: VllmPlugin(plugin, forward=...)."
    )


def _image(image: Any) -> Image:
    if isinstance(image, bytes):
        return Image(image)
    file = io.BytesIO()
    image.save(file, format="PNG")
    return Image(file.getvalue())


def _row(row: Any) -> SimpleNamespace:
    """Convert a row to vLLM's `PoolingRequestOutput`, as far as plugins read it."""
    import torch  # only plugins of vLLM need tensors

    payload = getattr(row, "payload", None)
    if payload is None:
        return SimpleNamespace(outputs=SimpleNamespace(data=row), prompt_token_ids=[], finished=True)
    (values,) = row.values.values()
    data = torch.from_numpy(values) if hasattr(values, "dtype") else values
    ids = list(getattr(payload, "ids", ()))
    return SimpleNamespace(outputs=SimpleNamespace(data=data), prompt_token_ids=ids, finished=True)


class _JsonConfig(SimpleNamespace):
    """The `config.json` of a model folder, as the plugin reads `hf_config`."""

    def to_dict(self) -> dict[str, Any]:
        """Return the settings of the file."""
        return dict(vars(self))


class _Renderer:
    """The part of vLLM's renderer that plugins use."""

    def __init__(self, setup: PluginSetup) -> None:
        self._setup = setup

    def get_tokenizer(self) -> Any:
        """Return the tokenizer of the served model."""
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self._setup.folder, local_files_only=True)


def _vllm_config(setup: PluginSetup) -> SimpleNamespace:
    """Return the part of vLLM's configuration that plugins read."""
    card, settings = setup.card, {}
    if setup.folder is not None and (file := Path(setup.folder, "config.json")).exists():
        try:
            settings = foreign_json.decode(read_file(file))
        except (OSError, BadFile, foreign_json.BadJson) as error:
            raise ConfigError(f"{file}: cannot be read as JSON: {error}") from None
        if not isinstance(settings, dict):
            raise ConfigError(f"{file}: must hold an object")
    model = SimpleNamespace(
        model=setup.folder,
        served_model_name=None if card is None else card.name,
        hf_config=_JsonConfig(**settings),
        max_model_len=None if card is None else card.max_tokens,
        pooler_config=SimpleNamespace(task=None, pooling_type=None if card is None else card.pooling),
        dtype=None if card is None else card.dtype,
    )
    return SimpleNamespace(model_config=model, device_config=SimpleNamespace(device=setup.config.device))
