"""How an engine is set up: one frozen value, checked once."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Literal

from staged_pool.runtime.allowed_hosts import AllowedHosts
from staged_pool.runtime.device_names import device_names
from staged_pool.runtime.machine.cores import usable_cores
from staged_pool.runtime.reranking import AskedFor
from staged_pool.stages.errors import ConfigError

DType = Literal["auto", "float32", "bfloat16", "float16"]
Attention = Literal["auto", "packed", "padded"]
Task = Literal["auto", "embed", "sparse", "score"]
ImagePath = Literal["fast", "exact"]
Tune = Literal["auto", "off", "again"]

MOST_IMAGE_THREADS: Final = 16
"""By default: each may hold a whole image, or be a process of its own (see `models/images/own_code.py`)."""


LEAST_MEMORY_BYTES: Final = 256 * 2**20
"""The least limit of memory: Python and torch alone take this much. A smaller one is a mistake in the unit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Settings of one engine.

    Raises:
        ConfigError: A value is out of its range; the message names field, value and range.
    """

    model: str | None = None
    """A model folder or a hub id. None: the installed first-run model, else
    `sentence-transformers/all-MiniLM-L6-v2` from the hub."""

    revision: str | None = None
    """Branch, tag or commit of a hub id. None: the hub's default branch. Refused with a folder."""

    offline: bool = False
    """Never ask the hub; a hub id must then be in the local cache."""

    served_name: str | None = None
    """The name that requests and answers use. None: the folder's last part, or the hub id."""

    task: Task = "auto"
    """What a model is for whose folder does not say so. `score`: a language model is asked whether a document answers a
    query, as the authors of its family ask it, or as `score_template` and `score_tokens` say. `embed`: a language
    model, or a checkpoint with a head of its own, gives vectors instead. `sparse`: a masked language model is a SPLADE
    model. `auto`: what the folder says; a language model that is no known reranker is rejected."""

    score_template: str | None = None
    """What a model that scores reads of a pair: a text with the fields `{query}`, `{document}` and, if wanted,
    `{instruction}`. None: what the folder says, or the family of rerankers that it is recognised as."""

    score_tokens: str | None = None
    """What a language model's score is made of, with `score_template`: the token that means yes and the one that means
    no, such as `yes,no`, for the softmax of their logits; or one token, for its logit. As the vocabulary spells them,
    or as texts of one token. None: what the folder says, or the family that it is recognised as."""

    allow_pickle: bool = False
    """Whether pickled weights (pytorch_model.bin) may hold more than tensors, which may run code that is in them. Only
    for a folder that is trusted. Bare tensors are read without it, and run no code."""

    trust_remote_code: bool = False
    """Whether Python code of the model folder may run. Only for a folder that has been read and is trusted."""

    device: str = "auto"
    """Where forwards run: `cpu`, `cuda` or `cuda:1`, or several with commas between them. Each has the weights for
    itself, and takes its batches from what waits for all. `auto`: the first CUDA device where torch sees one, else the
    CPU."""

    dtype: DType = "auto"
    """Of the weights. `auto`: bfloat16 where a GPU computes in it natively, else float16; on a CPU bfloat16 where that
    is found to be quicker than float32 (see `tune`). It is up to three times as fast there, with cosines to float32
    above 0.9998. float16 is for GPUs."""

    tune: Tune = "auto"
    """How the quickest of several ways to compute the same is chosen on a CPU; they differ in the last bits. `auto`: as
    in a decision file of this processor and version of torch, in the user's cache folder; what is not in it is measured
    once, and written there. `off`: by a table of processors; nothing is measured, so loading is quicker, and replicas
    on equal machines agree without a file. `again`: as `auto`, but everything is measured anew."""

    deterministic: bool = False
    """Whether the same text has the same bits alone, in any batch and after any other, on a CPU. Each input then has a
    forward to itself, on one thread, and ways are chosen as with `tune` off. Batches gain nothing any more: many short
    texts take longer, and a long text has one core instead of all."""

    cuda_graphs: bool = True
    """Whether small batches of small models are recorded on a GPU, and replayed. That takes seconds at load and some
    memory, and spares the host asking for each kernel."""

    attention: Attention = "auto"
    """`packed`: no padding is computed; refused for a model whose attention cannot be replaced.
    `padded`: every batch is padded to its longest input. `auto`: packed where it is right."""

    matryoshka: bool | None = None
    """Whether vectors may be cut to fewer dimensions. None: where the folder says that the model was trained for it."""

    split_long_inputs: bool = False
    """Whether a text that is longer than the model takes is cut into parts, of which its embedding is the mean. Else it
    is refused. Only for models that give dense vectors."""

    torch_threads: int | None = None
    """Threads of all forwards together on the CPU. None: every core that this process may use. Fewer leave
    cores for the preprocess threads; more than there are cores make everything slower."""

    forward_workers: int | None = None
    """Forwards at once on the CPU; they share the torch threads, and one that is alone uses all of them. None: 2 of
    2 to 7 threads, 4 of more: they lose less where something else needs a core now and then. Each batch takes longer by
    them. A GPU has one. Several devices have one each at least."""

    preprocess_limit: int = 4
    """Preprocess calls at once, each in a thread. More help slow inputs to overtake each other, until the
    threads take the device's cores away."""

    image_preprocess_limit: int | None = None
    """Preprocess calls for images at once, each in a thread and each of one image: texts never wait behind them.
    None: as many as this process may use cores, see `image_preprocess_threads`; more get nothing more done."""

    image_path: ImagePath = "fast"
    """How an image becomes pixels. `fast`: by our own code, on bytes, wherever the folder's image processor can be
    followed exactly, with cosines to the other way above 0.999; else as `exact`. `exact`: by the image processor of
    transformers, with several times the CPU time."""

    image_draft: bool = False
    """Let the JPEG decoder give a smaller image where the model wants one less than half as large: about half the
    time, at a slight loss of sharpness."""

    image_cache_mb: int = 0
    """Memory for prepared images, in 10^6 bytes: one that comes again is not decoded again. 0: none is kept."""

    max_image_pixels: int = 64_000_000
    """Pixels of one image; a larger one is rejected when its header has been read. While it is read, one takes 1 to 5
    bytes a pixel (a PNG of 16 bits with a transparent colour 9, a progressive JPEG up to 12, a WebP 17), and 10 to 14
    more on the exact path: see `python -m perf.image_memory`. Images wait until there is memory for them."""

    max_image_bytes: int = 20 * 2**20
    """Of one encoded image, sent or fetched."""

    allow_media_domains: tuple[str, ...] = ()
    """Hosts from which images may be fetched, such as `example.com` (with all hosts below it), or `*` for all with a
    public address. Empty: URLs are refused. What a caller names is fetched by this server, from its place in the
    network: addresses that are not public are never asked, whatever name leads to them, but for those that stand here
    themselves, such as `10.0.0.5`."""

    allow_media_path: str | None = None
    """A folder; images in it may be named by file:// URLs. None: such URLs are refused."""

    media_limit: int = 16
    """Fetches at once, and as many reads of files."""

    media_timeout_s: float = 5.0
    """Of one fetch, from looking the host up to the last byte, with all redirects; or of one file. A read that takes
    longer is logged, and keeps its place until it ends: nothing can end it."""

    max_batch_tokens: int | None = None
    """Token budget of one batch at most. A longer single input still goes, alone. Larger batches keep the device
    busier; each takes longer, and so does the wait of whoever comes next. None: on a GPU 4096 where few requests wait,
    growing to 16384 where dozens do, as far as its memory has room for that. On a CPU 512 where few
    requests wait, growing to 1024 where dozens do: alone small ones are as quick a token, but every call of a kernel
    may have to wait for the interpreter, and they make twice as many."""

    target_batch_s: float | None = None
    """How long the forward of one batch is to take at most, in seconds: its budget is then what keeps to that, as
    measured, up to `max_batch_tokens`. Shorter lets whoever comes next wait less for the device, and costs throughput
    where small batches take longer a token. None: the budget is what `max_batch_tokens` says."""

    max_batch_items: int = 256
    """Items of one batch at most."""

    chunk_items: int = 16
    """Items that travel together at most. Smaller lists overlap the stages of one request better; larger
    ones cost less per item."""

    channel_capacity: int = 2
    """Lists that may wait in the channel between two stages: in front of preprocess more of them, if they hold no more
    than so many full ones; in front of parse as many requests as these hold items. More add latency, not throughput."""

    waiting_tokens: int = 131_072
    """Tokens that preprocess and the device hold at most, over all requests, from feeding to the end of their forward.
    A request is fed as many as it leaves free; each token takes a few dozen bytes."""

    max_requests: int = 1024
    """Requests inside the engine; one more is refused at the door."""

    max_items: int = 32768
    """Items inside the engine, over all requests."""

    max_tokens: int = 4 * 2**20
    """Tokens inside the engine: estimated from the bytes of a request until they are counted."""

    target_delay_s: float = 5.0
    """A request is refused as soon as it would wait longer than about this for its answer. Shorter keeps every
    accepted request quick and refuses more of a burst; longer takes in more than clients may be willing to wait for."""

    max_request_items: int = 2048
    """Items of one request; more are refused as too large, whatever the load."""

    max_bytes: int = 256 * 2**20
    """Bytes of request bodies inside the engine."""

    memory_limit_bytes: int | None = None
    """Bytes of memory that the process may take. What models and caches leave of it is divided among bodies,
    answers and image decodes; near the limit less is done at once, and requests are rejected. None: the limit of its
    control groups, or else what the machine has left at the start."""

    coalesce: bool = True
    """Whether inputs that become the same tokens (or the same pixels) and are inside at the same time go through the
    device once, for all of a tenant and a priority who asked. Without it each does, and everybody pays for the
    duplicates of the others."""

    result_cache_mb: int = 0
    """Memory for what the device gave, in 10^6 bytes: an input that comes again does not go through it again. More
    keeps more of the past, of which the least recently used goes first. 0: nothing is kept."""

    share_between_tenants: bool = False
    """Whether tenants share the results and prepared images that are kept: see `result_cache_mb` and `image_cache_mb`.
    On, a tenant can find out by the time of an answer what others have asked. A request's `cache_salt` keeps it apart
    either way. Off: each tenant has its own, and requests of no tenant are a tenant of their own."""

    drain_timeout_s: float = 30.0
    """How long a closing engine finishes what is inside; what is left then fails."""

    watchdog_s: float = 120.0
    """A forward that takes longer counts as stuck: everything inside fails and the engine is broken."""

    preprocess_alarm_s: float = 30.0
    """A preprocess call that takes longer counts as overdue: it is logged and counted, and it keeps its thread. With
    every thread overdue the engine takes no requests."""

    def __post_init__(self) -> None:
        positive = (
            "preprocess_limit", "max_batch_items", "chunk_items", "channel_capacity",
            "waiting_tokens", "max_requests", "max_items", "max_tokens",
            "max_request_items", "max_bytes", "max_image_pixels", "max_image_bytes",
            "media_limit",
        )  # fmt: skip
        for name in positive:
            self._check(name, 1, math.inf)
        for name in ("max_batch_tokens", "image_preprocess_limit"):
            if getattr(self, name) is not None:
                self._check(name, 1, math.inf)
        if self.target_batch_s is not None:
            self._check("target_batch_s", 0.0001, 86_400)
        if self.torch_threads is not None:
            self._check("torch_threads", 1, 1024)
        if self.forward_workers is not None:
            self._check("forward_workers", 1, 64)
        if self.memory_limit_bytes is not None:
            self._check("memory_limit_bytes", LEAST_MEMORY_BYTES, math.inf)
        self._check("target_delay_s", 0.001, 86_400)
        self._check("drain_timeout_s", 0, 86_400)
        self._check("preprocess_alarm_s", 0.001, 86_400)
        self._check("watchdog_s", 0.001, 86_400)
        self._check("image_cache_mb", 0, math.inf)
        self._check("result_cache_mb", 0, math.inf)
        self._check("media_timeout_s", 0.001, 86_400)
        for name, allowed in (
            ("dtype", ("auto", "float32", "bfloat16", "float16")),
            ("attention", ("auto", "packed", "padded")),
            ("task", ("auto", "embed", "sparse", "score")),
            ("image_path", ("fast", "exact")),
            ("tune", ("auto", "off", "again")),
        ):
            if getattr(self, name) not in allowed:
                raise ConfigError(f"{name}={getattr(self, name)!r}: must be one of {', '.join(allowed)}")
        if self.deterministic and self.tune == "again":
            raise ConfigError("tune='again': with deterministic nothing is measured")
        AskedFor.of(self.score_template, self.score_tokens)
        kind = device_names(self.device)[0][:4]
        if kind == "cpu" and self.dtype == "float16":
            raise ConfigError("dtype='float16': is for GPUs; a CPU takes float32 or bfloat16")
        if kind == "cuda" and (self.forward_workers or 1) > 1:
            raise ConfigError(f"forward_workers={self.forward_workers}: a cuda device runs one forward at a time")
        AllowedHosts.of(self.allow_media_domains)
        if self.model == "":
            raise ConfigError("model='': must be a folder or a hub id")

    @property
    def image_preprocess_threads(self) -> int:
        """The `image_preprocess_limit`, or what stands for None: a thread for each core, of which a second one is worth
        nine tenths of the first (`python -m perf preprocess`); two at least, so that one image that takes long holds
        up no other, and `MOST_IMAGE_THREADS` at most."""
        return self.image_preprocess_limit or min(max(2, usable_cores()), MOST_IMAGE_THREADS)

    def batch_tokens(self, device: str, memory_tokens: int | None = None) -> int:
        """The token budget of a batch where much waits: `max_batch_tokens`, or what stands for None.

        Args:
            device: What a model's card says, such as `cpu`.
            memory_tokens: What its memory has room for. None: not known.
        """
        wanted = self.max_batch_tokens or (1024 if device.startswith("cpu") else 16_384)
        return wanted if memory_tokens is None else min(wanted, memory_tokens)

    def least_batch_tokens(self, device: str, memory_tokens: int | None = None) -> int:
        """The token budget of a batch where little waits. See `batch_tokens`."""
        return min(512 if device.startswith("cpu") else 4096, self.batch_tokens(device, memory_tokens))

    def _check(self, name: str, low: float, high: float) -> None:
        value = getattr(self, name)
        kind = int if "int" in EngineConfig.__annotations__[name] else (int, float)
        if isinstance(value, bool) or not isinstance(value, kind) or not low <= value <= high:
            wanted = f"at least {low}" if high == math.inf else f"between {low} and {high}"
            raise ConfigError(f"{name}={value!r}: must be {wanted}")
