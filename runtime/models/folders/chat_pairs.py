"""Read what a folder says of pairs that go through a chat template, as sentence-transformers' CrossEncoder does it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from staged_pool.runtime.models.specs.json_file import JsonFile
from staged_pool.runtime.models.specs.model import PairTemplate
from staged_pool.stages.errors import ConfigError

_STRUCTURED: Final = ("content[0]", ".type", "'type'", '"type"', "message.content[")
"""What a template has in it that wants a message's content as a list: sentence-transformers' own guess."""

_OF_THE_CALL: Final = ("truncation", "max_length", "padding", "return_tensors")
"""What a CrossEncoder keeps among the arguments of a template, and is not for the template."""


def chat_template(body: Path, *, root: Path) -> str | None:
    """The chat template of the folder's tokenizer.

    Raises:
        ConfigError: It cannot be read.
    """
    try:
        return (body / "chat_template.jinja").read_text(encoding="utf-8")
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        raise ConfigError(f"chat_template.jinja: cannot be read as text: {error}") from error
    settings = JsonFile.read(body / "tokenizer_config.json", root=root) or JsonFile.empty()
    template = settings.content.get("chat_template")
    if isinstance(template, list):  # several by name, of which transformers takes this one
        named = [one.get("template") for one in template if isinstance(one, dict) and one.get("name") == "default"]
        template = named[-1] if named else None
    return template if isinstance(template, str) else None


def pair_template(transformer: JsonFile, chat: str | None, *, instruction: str | None) -> PairTemplate | None:
    """How a pair goes through the chat template; None where it does not.

    It does where the Transformer says that it reads messages. One that says nothing reads them where its template
    knows the roles of a pair: another template would leave both texts out.

    Args:
        transformer: `sentence_bert_config.json`.
        chat: The chat template.
        instruction: What the model is to look for unless a request says it.

    Raises:
        ConfigError: A field is malformed, or asks for something else than the template.
    """
    said = transformer.get("modality_config", dict, None)
    if said is None:
        if chat is None or not all(re.search(f"""["']{role}["']""", chat) for role in ("query", "document")):
            return None
        message: JsonFile = JsonFile.empty()
    else:
        found = JsonFile(f"{transformer.name}: modality_config", said).get("message", dict, None)
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
    if others := sorted(set(arguments).intersection(_OF_THE_CALL)):
        raise ConfigError(f"{processing.name}: chat_template.{others[0]} is not supported")
    structured = any(sign in (chat or "") for sign in _STRUCTURED) if kind == "auto" else kind == "structured"
    return PairTemplate(instruction=instruction, structured=structured, arguments=arguments)
