"""The flags that several commands share, each also a variable of the environment."""

from __future__ import annotations

import re
from typing import Annotated, Any, Final, Literal, TypeAlias

import typer

from staged_pool.runtime.config import Attention, DType, ImagePath, Task, Tune
from staged_pool.stages.errors import ConfigError

Backend: TypeAlias = Literal["asyncio", "trio"]
LogLevel: TypeAlias = Literal["debug", "info", "warning", "error"]
LogFormat: TypeAlias = Literal["auto", "text", "json"]


def flag(name: str, panel: str, text: str) -> Any:
    """An option that can also be set in the environment, as `STAGED_POOL_` and its name."""
    variable = "STAGED_POOL_" + name.split("/", maxsplit=1)[0].removeprefix("--").replace("-", "_").upper()
    return typer.Option(name, envvar=variable, rich_help_panel=panel, help=text)


_BYTES: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?", re.IGNORECASE)


def read_bytes(name: str, text: str) -> int:
    """Read a number of bytes: `2500M` is 2500 * 10^6, and `4Gi` is 4 * 2^30.

    Args:
        name: Setting that the number is for.
        text: The number and its unit.

    Raises:
        ConfigError: It is written in another way.
    """
    if (found := _BYTES.fullmatch(text.strip())) is None:
        raise ConfigError(f"{name}={text!r}: must be bytes with a unit, such as 3500M, 4G or 4Gi")
    number, unit, is_binary = found.groups()
    return int(float(number) * (1024 if is_binary else 1000) ** " KMGT".index(unit.upper() or " "))


Model = Annotated[
    str | None,
    flag("--model", "Model", "Folder, or hub id. Default: the installed first-run model, else all-MiniLM-L6-v2."),
]
Models = Annotated[
    list[str] | None,
    flag(
        "--model",
        "Model",
        "Folder, or hub id. Default: the installed first-run model, else all-MiniLM-L6-v2. Repeat it, as name=folder "
        "or name=hub-id, to serve several; requests say which by its name.",
    ),
]
Revision = Annotated[
    str | None, flag("--revision", "Model", "Branch, tag or commit of a hub id. Pin it, or an update changes vectors.")
]
Offline = Annotated[
    bool, flag("--offline", "Model", "Never ask the hub: start from the local cache or fail. Faster starts.")
]
TaskFlag = Annotated[
    Task,
    flag(
        "--task",
        "Model",
        "What a model is for where its folder does not say it. score: ask a language model whether a document answers "
        "a query, as its family is asked, or as --score-template and --score-tokens say. embed: vectors, whatever head "
        "the checkpoint has. sparse: take a masked language model for a SPLADE model.",
    ),
]
ScoreTemplate = Annotated[
    str | None,
    flag(
        "--score-template",
        "Model",
        "What a model that scores reads of a pair: a text with {query}, {document} and, if wanted, {instruction}.",
    ),
]
ScoreTokens = Annotated[
    str | None,
    flag(
        "--score-tokens",
        "Model",
        "What a language model's score is made of, with --score-template: the token that means yes and the one that "
        "means no, as yes,no, for the softmax of their logits; or one token, for its logit. Other tokens give other "
        "scores.",
    ),
]
AllowPickle = Annotated[
    bool, flag("--allow-pickle", "Model", "Read pickled weights that hold more than tensors. Only if you trust them.")
]
TrustRemoteCode = Annotated[
    bool,
    flag("--trust-remote-code", "Model", "Run Python code of the model folder. Only code that you have read."),
]
DeviceFlag = Annotated[
    str,
    flag(
        "--device",
        "Device",
        "Where forwards run: cpu, cuda, cuda:1, or several as cuda:0,cuda:1, each with the weights for itself. auto: "
        "the first CUDA device, else the CPU.",
    ),
]
CudaGraphs = Annotated[
    bool,
    flag(
        "--cuda-graphs/--no-cuda-graphs",
        "Device",
        "Record small batches of small models on a GPU, and replay them. Takes seconds at load, and some memory.",
    ),
]
TuneFlag = Annotated[
    Tune,
    flag(
        "--tune",
        "Device",
        "How the quickest of several ways to compute the same is chosen on a CPU; they differ in the last bits. auto: "
        "measured once, and kept in a decision file in the user's cache folder (XDG_CACHE_HOME), so that a restart "
        "gives the same bits and loads quickly. off: by a table of processors; replicas agree without a file, and may "
        "be slower. again: measure anew and keep that, such as after a first start on a busy machine.",
    ),
]
Deterministic = Annotated[
    bool,
    flag(
        "--deterministic",
        "Device",
        "The same bits for the same text on a CPU: alone, in any batch, after any other. Each input has a forward to "
        "itself, on one thread, and --tune is off. Batches gain nothing any more: many short texts take longer, "
        "and a long text has one core instead of all.",
    ),
]
DTypeFlag = Annotated[
    DType,
    flag(
        "--dtype",
        "Device",
        "Of the weights. auto: bfloat16 where a GPU computes in it natively, else float16; on a CPU bfloat16 where "
        "that is found to be quicker than float32. It is up to three times as fast there, with cosines to float32 "
        "above 0.9998.",
    ),
]
AttentionFlag = Annotated[
    Attention,
    flag(
        "--attention", "Device", "packed computes no padding; padded suits any model. auto: packed where it is right."
    ),
]
Matryoshka = Annotated[
    bool | None,
    flag(
        "--matryoshka/--no-matryoshka",
        "Model",
        "Whether vectors may be cut to fewer dimensions. Default: where the folder says that the model was trained for "
        "it.",
    ),
]
SplitLongInputs = Annotated[
    bool,
    flag(
        "--split-long-inputs",
        "Model",
        "Cut a text that is too long into parts and give the mean of their vectors, instead of refusing it.",
    ),
]
TorchThreads = Annotated[
    int | None,
    flag(
        "--torch-threads",
        "Device",
        "Threads of all forwards together on the CPU. Default: every core. Fewer leave cores to preprocessing; more "
        "than there are cores slow everything down.",
    ),
]
ForwardWorkers = Annotated[
    int | None,
    flag(
        "--forward-workers",
        "Device",
        "Forwards at once on the CPU, which share the torch threads. Default: 2 of 2 to 7 threads, 4 of more.",
    ),
]
ImagePathFlag = Annotated[
    ImagePath,
    flag(
        "--image-path",
        "Images",
        "How an image becomes pixels. fast: by our own code, wherever the folder's image processor can be followed "
        "exactly. exact: by the image processor of transformers, with several times the CPU time.",
    ),
]
ImageDraft = Annotated[
    bool,
    flag(
        "--image-draft",
        "Images",
        "Let the JPEG decoder give a smaller image where the model wants one less than half as large: about half the "
        "time, at a slight loss of sharpness.",
    ),
]
MaxImagePixels = Annotated[
    int,
    flag(
        "--max-image-pixels",
        "Images",
        "Of one image; a larger one is rejected when its header has been read. While it is read, one takes 1 to 5 "
        "bytes a pixel (a PNG of 16 bits with a transparent colour 9, a progressive JPEG up to 12, a WebP 17), and 10 "
        "to 14 more where images go the exact path. Images wait until there is memory for them.",
    ),
]
LogLevelFlag = Annotated[LogLevel, flag("--log-level", "Logs", "The least that is logged. debug includes probes.")]
LogFormatFlag = Annotated[
    LogFormat, flag("--log-format", "Logs", "auto: text on a terminal, else one JSON object a line. To stderr.")
]
BackendFlag = Annotated[
    Backend,
    flag("--backend", "Server", "Event loop. asyncio uses uvloop where it is installed, and is the faster one."),
]
