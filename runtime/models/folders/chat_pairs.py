"""Settings of pairs that go through a chat template, as in sentence-transformers' CrossEncoder."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from staged_pool.runtime.models.specs.json_file import JsonFile
from staged_pool.runtime.models.specs.pair_forms import PairTemplate
from staged_pool.stages import foreign_text
from staged_pool.stages.errors import ConfigError
from staged_pool.stages.foreign_file import read_file

_STRUCTURED_SIGNS: Final = ("content[0]", ".type", "'type'", '"type"', "message.content[")
"""Signs of a template that takes a message's content as a list: the heuristic of sentence-transformers."""

_TOKENIZER_ARGUMENTS: Final = ("truncation", "max_length", "padding", "return_tensors")
"""Tokenizer arguments that a CrossEncoder may save among those of the template: none of them is supported."""


def chat_template(body: Path, *, root: Path) -> str | None:
    """The chat template of the folder's tokenizer; None if it has none.

    Raises:
        ConfigError: The file is not text.
    """
    try:
        found = foreign_text.decoded(bytes(read_file(body / "chat_template.jinja")))
        return found.replace("\r\n", "\n").replace("\r", "\n")
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        raise ConfigError(f"chat_template.jinja: cannot be read as text: {error}") from error
    settings = JsonFile.read(body / "tokenizer_config.json", root=root) or JsonFile.empty()
    template = settings.content.get("chat_template")
    if isinstance(template, list):  # several by name; transformers takes the one named "default"
        named = [each.get("template") for each in template if isinstance(each, dict) and each.get("name") == "default"]
        template = named[-1] if named else None
    return template if isinstance(template, str) else None


def pair_template(transformer: JsonFile, chat: str | None, *, instruction: str | None) -> PairTemplate | None:
    """Read the pair template of a folder that renders pairs by its chat template; None for other folders.

    A folder does so if `modality_config` has messages. Without `modality_config`, it does so if the template names the
    roles `query` and `document`: any other template would drop both texts.

    Args:
        transformer: `sentence_bert_config.json`.
        chat: The chat template.
        instruction: The instruction of requests that bring none.

    Raises:
        ConfigError: A field is malformed, or a setting is not supported.
    """
    modalities = transformer.get("modality_config", dict, None)
    if modalities is None:
        if chat is None or not all(re.search(f"""["']{role}["']""", chat) for role in ("query", "document")):
            return None
        message: JsonFile = JsonFile.empty()
    else:
        found = JsonFile(f"{transformer.name}: modality_config", modalities).get("message", dict, None)
        if found is None:
            return None
        message = JsonFile(f"{transformer.name}: modality_config.message", found)
    kind = message.get("format", str, "auto")
    if kind not in ("auto", "flat", "structured"):
        raise ConfigError(f"{message.name}: format={kind!r} is not known, only auto, flat and structured")
    processing = JsonFile(f"{transformer.name}: processing_kwargs", transformer.get("processing_kwargs", dict, {}))
    if others := sorted(set(processing.content) - {"chat_template"}):
        raise ConfigError(f"{processing.name}: {others[0]} is not supported")
    arguments = {k: v for k, v in processing.get("chat_template", dict, {}).items() if k != "restore_suffix"}
    if others := sorted(set(arguments).intersection(_TOKENIZER_ARGUMENTS)):
        raise ConfigError(f"{processing.name}: chat_template.{others[0]} is not supported")
    structured = any(sign in (chat or "") for sign in _STRUCTURED_SIGNS) if kind == "auto" else kind == "structured"
    return PairTemplate(instruction=instruction, structured=structured, arguments=arguments)
