"""Settings of an engine: one frozen value, checked once, and the table of its flags."""

# Longer than 350 lines: each field stands beside its help text, as one table.

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from staged_pool.runtime.allowed_hosts import AllowedHosts
from staged_pool.runtime.device_names import device_names
from staged_pool.runtime.machine.cores import usable_cores
from staged_pool.runtime.reranking import RerankerPrompt
from staged_pool.runtime.settings import BYTES, DAY_S, check_settings, setting
from staged_pool.stages.errors import ConfigError

DType = Literal["auto", "float32", "bfloat16", "float16", "int8"]
Attention = Literal["auto", "packed", "padded"]
Task = Literal["auto", "embed", "sparse", "score"]
ImagePath = Literal["fast", "exact"]
PreprocessPlace = Literal["thread", "process"]
Tune = Literal["auto", "off", "again"]

MOST_IMAGE_THREADS: Final = 16
"""Most preprocess threads for images by default: each may hold a whole image, or be a process of its own."""


LEAST_MEMORY_BYTES: Final = 256 * 2**20
"""Least memory limit in bytes: Python and torch alone take this much. A smaller one is a mistake in the unit."""


OF_ONE_MODEL: Final = frozenset(
    {"model", "served_name", "plugin", "revision", "task", "score_template", "score_tokens", "dtype"}
)
"""Settings that are not taken over from one model for another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Settings of one engine. docs/configuration.md has the same table for reading.

    Raises:
        ConfigError: A value is out of its range; the message names field, value and range.
    """

    model: str | None = setting(
        None,
        "Model folder, or id on the Hugging Face hub, such as BAAI/bge-small-en-v1.5.",
        group="Model",
        basic=True,
        metavar="FOLDER|ID",
        default_text="the installed first-run model, else sentence-transformers/all-MiniLM-L6-v2",
        more="serve takes several, as name=folder or name=id: repeat the flag. Requests then name one.",
        completes="dir",
    )
    revision: str | None = setting(
        None,
        "Branch, tag or commit of a hub id. Pin a commit: an update changes the vectors.",
        group="Model",
        basic=True,
        metavar="NAME",
        default_text="the default branch",
        more="Rejected for a folder.",
    )
    offline: bool = setting(
        False,
        "Never contact the hub: use its local cache, or fail.",
        group="Model",
        basic=True,
    )
    served_name: str | None = setting(
        None,
        "Name of the model in requests and answers.",
        group="Model",
        basic=True,
        metavar="NAME",
        default_text="the last part of the folder, or the hub id",
    )
    task: Task = setting(
        "auto",
        "Task of a model whose folder does not name one, such as --task score for an unknown reranker.",
        group="Model",
        more="auto: as the folder says; a language model that is no known reranker is rejected. "
        "embed: give vectors, whatever head the checkpoint has. "
        "sparse: read a masked language model as a SPLADE model. "
        "score: ask a language model whether a document answers a query. "
        "The question is that of its family, or that of --score-template and --score-tokens.",
    )
    score_template: str | None = setting(
        None,
        "Prompt of a pair for a model that scores, such as 'Query: {query} Document: {document}'.",
        group="Model",
        metavar="TEXT",
        more="It needs the fields {query} and {document}, and may have {instruction}.",
        default_text="as the folder says, or the family of rerankers that it belongs to",
    )
    score_tokens: str | None = setting(
        None,
        "Tokens that a language model scores by: yes,no takes the softmax of both logits; one token takes its logit.",
        group="Model",
        metavar="YES[,NO]",
        more="Use it with --score-template. Write the tokens as the vocabulary does, or as texts of one token.",
        default_text="as the folder says, or the family of rerankers that it belongs to",
    )
    allow_pickle: bool = setting(
        False,
        "Load pickled weights (pytorch_model.bin) that hold more than tensors, which can run code.",
        group="Model",
        more="Set it only for a folder that you trust. Bare tensors are read without it, and run no code.",
    )
    trust_remote_code: bool = setting(
        False,
        "Run Python code of the model folder. Set it only for code that you have read.",
        group="Model",
    )
    plugin: tuple[str, ...] = setting(
        (),
        "Plugin to serve, by its name. Repeat for several.",
        group="Model",
        basic=True,
        metavar="NAME",
        more="docs/plugins.md has more. A plugin is an entry point in the group staged_pool.plugins, or one of vLLM's. "
        "If no --model is given, no model is loaded: each plugin must then have a forward of its own.",
    )
    device: str = setting(
        "auto",
        "Device of the forwards: cpu, cuda, cuda:1, or several GPUs as cuda:0,cuda:1.",
        group="Device",
        basic=True,
        metavar="NAME",
        shared=True,
        more="auto: the first CUDA device that torch sees, else the CPU. "
        "Each of several GPUs holds a copy of the weights, and takes batches from the common queue.",
    )
    dtype: DType = setting(
        "auto",
        "Data type: auto, float32, bfloat16, float16 (GPUs) or int8 (CPUs).",
        group="Device",
        basic=True,
        metavar="TYPE",
        more="auto on a GPU: bfloat16 where the GPU has it natively, else float16. "
        "auto on a CPU: bfloat16 where it is measured to be faster than float32 (see --tune). "
        "There it takes as little as a third of the time; cosines to float32 stay above 0.9998. "
        "For reproducible vectors on any machine, set float32. "
        "int8 is for texts on processors with VNNI but slow bfloat16: docs/int8.md has its gain and its loss.",
    )
    tune: Tune = setting(
        "auto",
        "Choice of the fastest CPU kernels; they differ in the last bits. Set off for equal bits on replicas.",
        group="Device",
        more="auto: measure once, and store the choice in a decision file in the user's cache folder "
        "(XDG_CACHE_HOME). Restarts then give the same bits, and load faster. "
        "off: choose by a table of processors. Nothing is measured, and replicas on equal machines agree "
        "without a file, but may be slower. "
        "again: measure once more, such as after a first start on a busy machine.",
    )
    deterministic: bool = setting(
        False,
        "Give the same bits for the same text on a CPU, alone or in any batch. Lowers throughput.",
        group="Device",
        more="Each input has its own forward on one thread, and kernels are chosen as with --tune off. "
        "Many short texts then take longer, and a long text uses one core instead of all.",
    )
    cuda_graphs: bool = setting(
        True,
        "Record forwards of some batch sizes on a GPU as CUDA graphs, and replay them.",
        group="Device",
        more="Recording takes seconds at load, and some GPU memory; replay saves a launch for each kernel.",
    )
    attention: Attention = setting(
        "auto",
        "Attention over a batch: packed computes no padding; padded suits any model.",
        group="Device",
        more="auto: packed where the model allows it. packed: rejected for a model whose attention cannot be replaced. "
        "padded: pad each batch to its longest input.",
    )
    matryoshka: bool | None = setting(
        None,
        "Allow requests to ask for fewer dimensions.",
        group="Model",
        default_text="on where the folder says that the model was trained for it",
    )
    split_long_inputs: bool = setting(
        False,
        "Split a text that is too long, and give the mean of the vectors of its parts.",
        group="Model",
        more="Off: such a text is rejected. Only for models that give one dense vector.",
    )
    torch_threads: int | None = setting(
        None,
        "CPU threads of all forwards together, such as 6 on 8 cores to leave 2 for preprocessing.",
        group="Device",
        low=1,
        high=1024,
        shared=True,
        default_text="one for each core that the process may use",
        more="More threads than cores slow everything down.",
    )
    forward_workers: int | None = setting(
        None,
        "Forwards at once on a CPU; they share the torch threads.",
        group="Device",
        low=1,
        high=64,
        shared=True,
        default_text="2 for 2 to 7 threads, 4 for more",
        more="A forward that runs alone uses all threads. "
        "More workers lose less time to other work on a core, but each batch takes longer. "
        "A GPU has one; several GPUs have at least one each.",
    )
    preprocess_limit: int = setting(
        4,
        "Preprocess calls at once, each in a thread.",
        group="Limits",
        low=1,
        shared=True,
        basic=True,
        more="More let short inputs overtake slow ones, until the threads take cores away from the device.",
    )
    image_preprocess_limit: int | None = setting(
        None,
        "Images that are preprocessed at once, each in a thread.",
        group="Images",
        low=1,
        shared=True,
        default_text="one for each core, from 2 to 16",
        more="Texts never wait behind them. More threads than cores gain nothing.",
    )
    preprocess_workers: PreprocessPlace | None = setting(
        None,
        "Place of preprocess: thread, or process, for Python code that would hold the interpreter's lock.",
        group="Limits",
        default_text="process for code of a model folder, else thread",
        more="Processes are started with the model, as many as the limits above allow for each kind of input. "
        "One that crashes fails its own inputs alone. They take memory, and tokenizers gain nothing in them.",
    )
    image_path: ImagePath = setting(
        "fast",
        "Image preprocessing: fast uses our own code; exact uses transformers, at several times the CPU time.",
        group="Images",
        more="fast follows the image processor of the folder, with cosines to exact above 0.999. "
        "Where it cannot, it falls back to exact.",
    )
    image_draft: bool = setting(
        False,
        "Decode a large JPEG at a smaller size: about half the time, slightly less sharp.",
        group="Images",
        more="Applies where the model needs an image less than half as large.",
    )
    image_cache_mb: int = setting(
        0,
        "Cache for preprocessed images, in 10^6 bytes, such as 512. 0: no cache.",
        group="Caching",
        low=0,
        more="An image that arrives again is not decoded again.",
    )
    max_image_pixels: int = setting(
        64_000_000,
        "Pixels of one image. A larger image is rejected once its header is read.",
        group="Images",
        low=1,
        more="Decoding takes 1 to 5 bytes a pixel. A PNG of 16 bits with a transparent colour takes 9, a progressive "
        "JPEG up to 12, a WebP 17. The exact path takes 10 to 14 more. "
        "`python -m perf.image_memory` measures this. Images wait until there is memory for them.",
    )
    max_image_bytes: int = setting(
        20 * 2**20,
        "Bytes of one encoded image, sent or fetched. A larger image is rejected.",
        group="Images",
        low=1,
    )
    max_video_bytes: int = setting(
        64 * 2**20,
        "Bytes of one encoded video, sent or fetched. A larger video is rejected.",
        group="Images",
        low=1,
    )
    max_video_seconds: float = setting(
        3600.0,
        "Seconds of one video, by the times of its frames. A longer video is rejected.",
        group="Images",
        low=0.001,
        high=DAY_S,
    )
    max_video_frames: int = setting(
        768,
        "Frames of one video that the model reads. A request for more is rejected.",
        group="Images",
        low=1,
        more="768 is the limit of Qwen2-VL. `--max-image-pixels` limits each frame.",
    )
    video_timeout_s: float = setting(
        30.0,
        "Seconds that decoding one video may take. A video that takes longer is rejected.",
        group="Images",
        low=0.001,
        high=DAY_S,
    )
    allow_media_domains: tuple[str, ...] = setting(
        (),
        "Host whose images may be fetched, such as example.org. Repeat for several.",
        group="Images",
        basic=True,
        flag="allow-media-domain",
        metavar="HOST",
        default_text="none; image URLs are rejected",
        more="Hosts below it are included. *: every host with a public address. "
        "This server fetches the URLs, from its own place in the network. "
        "So a private address is contacted only if it is listed here itself, such as 10.0.0.5.",
    )
    allow_media_path: str | None = setting(
        None,
        "Folder whose images may be named by file:// URLs.",
        group="Images",
        metavar="FOLDER",
        default_text="none; file:// URLs are rejected",
        completes="dir",
    )
    media_limit: int = setting(
        64,
        "Image fetches at once, as many file reads, and as many requests in the first hooks of a plugin.",
        group="Images",
        low=1,
    )
    media_timeout_s: float = setting(
        5.0,
        "Seconds for one fetch with its redirects, or for one file; then 504.",
        group="Images",
        low=0.001,
        high=DAY_S,
        more="The time starts with the name lookup. A file read that takes longer is logged; nothing can end it, "
        "so it counts against --media-limit until it returns.",
    )
    max_batch_tokens: int | None = setting(
        None,
        "Tokens of one batch. At 1000, a batch holds 10 texts of 100 tokens, or one text of 1000.",
        group="Batching",
        basic=True,
        low=1,
        default_text="by queue length: 512 to 1024 on a CPU, 4096 to 16384 on a GPU as memory allows",
        more="Larger batches raise throughput; each takes longer, and so does the wait of the next request. "
        "A longer single input still runs, alone.",
    )
    target_batch_s: float | None = setting(
        None,
        "Seconds that the forward of one batch may take, such as 0.1; batches shrink to keep to it.",
        group="Batching",
        low=0.0001,
        high=DAY_S,
        default_text="none; --max-batch-tokens alone bounds a batch",
        more="Batches still hold at most --max-batch-tokens. A shorter target lets the next request wait less, "
        "and costs throughput where small batches take longer for each token.",
    )
    max_batch_items: int = setting(
        256,
        "Items of one batch. Bounds a batch of very short texts.",
        group="Batching",
        low=1,
    )
    chunk_items: int = setting(
        16,
        "Items that travel between stages together.",
        group="Batching",
        low=1,
        has_flag=False,
        more="Fewer overlap the stages of one request better; more cost less for each item.",
    )
    channel_capacity: int = setting(
        2,
        "Lists that may wait in the channel between two stages.",
        group="Batching",
        low=1,
        has_flag=False,
        more="In front of preprocess, more lists may wait if they hold no more items than this many full ones. "
        "In front of parse, as many requests may wait as these lists hold items. "
        "More add latency, not throughput.",
    )
    waiting_tokens: int = setting(
        131_072,
        "Tokens that preprocess and the device hold, over all requests, until the end of their forward.",
        group="Batching",
        low=1,
        has_flag=False,
        more="A request is fed only as many as this leaves free. Each token takes a few dozen bytes.",
    )
    max_requests: int = setting(
        1024,
        "Requests in flight at once. One more is rejected with 429.",
        group="Limits",
        basic=True,
        low=1,
        more="More let the wait under load grow longer.",
    )
    max_items: int = setting(
        32768,
        "Items in flight at once, over all requests. A request beyond that is rejected with 429.",
        group="Limits",
        low=1,
        more="An item is one text, pair or image.",
    )
    max_tokens: int = setting(
        4 * 2**20,
        "Tokens in flight at once, over all requests.",
        group="Limits",
        low=1,
        has_flag=False,
        more="They are estimated from the bytes of a request until they are counted.",
    )
    target_delay_s: float = setting(
        5.0,
        "Seconds to wait for an answer. A request that would wait longer is rejected.",
        group="Limits",
        basic=True,
        low=0.001,
        high=DAY_S,
        more="The status is 429. Set it below the timeout of your clients. "
        "A shorter delay keeps accepted requests fast, and rejects more of a burst. "
        "A longer one accepts requests that clients may not wait for.",
    )
    max_request_items: int = setting(
        2048,
        "Items of one request. More are rejected as too large, whatever the load.",
        group="Limits",
        low=1,
        has_flag=False,
    )
    max_bytes: int = setting(
        256 * 2**20,
        "Bytes of request bodies in flight at once.",
        group="Limits",
        low=1,
        has_flag=False,
    )
    memory_limit_bytes: int | None = setting(
        None,
        "Memory of the process, such as 4G or 3500M.",
        group="Limits",
        basic=True,
        flag="memory-limit",
        metavar="BYTES",
        low=LEAST_MEMORY_BYTES,
        unit=BYTES,
        shared=True,
        default_text="the limit of the container, else the memory that is free at start",
        more="G is 10^9 bytes and Gi is 2^30. Bodies, images in work and answers share the memory that models and "
        "caches leave. Near the limit, less runs at once and requests are rejected.",
    )
    coalesce: bool = setting(
        True,
        "Run equal inputs that are in flight at the same time through the device once.",
        group="Caching",
        more="Inputs are equal if they become the same tokens or the same pixels. "
        "They are shared within one tenant and priority.",
    )
    result_cache_mb: int = setting(
        0,
        "Cache for results, in 10^6 bytes, such as 256. 0: no cache.",
        group="Caching",
        basic=True,
        low=0,
        more="An input that arrives again does not run again. The least recently used result is evicted first.",
    )
    share_between_tenants: bool = setting(
        False,
        "Let tenants share cached results and preprocessed images.",
        group="Caching",
        more="A tenant can then find out by the time of an answer what others have sent. "
        "A request with a cache_salt stays apart either way. "
        "Off: each tenant has its own entries, and requests without a tenant count as one tenant.",
    )
    drain_timeout_s: float = setting(
        30.0,
        "Seconds to finish accepted requests after SIGTERM; the rest then fails.",
        group="Limits",
        basic=True,
        low=0,
        high=DAY_S,
        shared=True,
        more="The status of the rest is 503. "
        "Set it below the grace period of the supervisor, such as terminationGracePeriodSeconds.",
    )
    load_timeout_s: float = setting(
        1800.0,
        "Seconds that the load of a model may take, without its download.",
        group="Limits",
        low=0.001,
        high=DAY_S,
        shared=True,
        more="A longer one fails: at the start the server ends, later it goes on. "
        "A thread cannot be ended, so one that hangs, as on a disk that does not answer, keeps its memory; until it "
        "ends, other loads are rejected. Too low, a large model on a slow disk is never loaded.",
    )
    watchdog_s: float = setting(
        120.0,
        "Seconds after which a forward counts as stuck: all requests fail and the engine is broken.",
        group="Limits",
        low=0.001,
        high=DAY_S,
        has_flag=False,
        shared=True,
    )
    preprocess_alarm_s: float = setting(
        30.0,
        "Seconds after which a preprocess call counts as overdue.",
        group="Limits",
        low=0.001,
        high=DAY_S,
        has_flag=False,
        more="It is logged and counted, and keeps its thread. With every thread overdue, requests are rejected.",
    )

    def __post_init__(self) -> None:
        check_settings(self)
        if self.deterministic and self.tune == "again":
            raise ConfigError("tune='again': with deterministic nothing is measured")
        RerankerPrompt.of(self.score_template, self.score_tokens)
        kind = device_names(self.device)[0][:4]
        if kind == "cpu" and self.dtype == "float16":
            raise ConfigError("dtype='float16': is for GPUs; a CPU takes float32, bfloat16 or int8")
        if kind == "cuda" and self.dtype == "int8":
            raise ConfigError("dtype='int8': is for CPUs; a GPU takes float32, bfloat16 or float16")
        if kind == "cuda" and (self.forward_workers or 1) > 1:
            raise ConfigError(f"forward_workers={self.forward_workers}: a cuda device runs one forward at a time")
        AllowedHosts.of(self.allow_media_domains)
        if self.model == "":
            raise ConfigError("model='': must be a folder or a hub id")

    def preprocess_place(self, *, custom_code: bool = False) -> PreprocessPlace:
        """Return the place of preprocess: `preprocess_workers`, or its default.

        Args:
            custom_code: True for code of a model folder, which may hold the interpreter's lock for long, or crash.
        """
        return self.preprocess_workers or ("process" if custom_code else "thread")

    @property
    def image_preprocess_threads(self) -> int:
        """Threads that preprocess images: `image_preprocess_limit`, or its default.

        The default is a thread for each core. A second thread is worth nine tenths of the first
        (`python -m perf preprocess`). At least two, so that a slow image holds up no other; at most
        `MOST_IMAGE_THREADS`.
        """
        return self.image_preprocess_limit or min(max(2, usable_cores()), MOST_IMAGE_THREADS)

    def batch_tokens(self, device: str, memory_tokens: int | None = None) -> int:
        """Token budget of a batch while many requests wait: `max_batch_tokens`, or its default.

        Args:
            device: Device of the model's card, such as `cpu`.
            memory_tokens: Tokens that the memory of the device has room for. None: not known.
        """
        wanted = self.max_batch_tokens or (1024 if device.startswith("cpu") else 16_384)
        return wanted if memory_tokens is None else min(wanted, memory_tokens)

    def least_batch_tokens(self, device: str, memory_tokens: int | None = None) -> int:
        """Token budget of a batch while few requests wait. See `batch_tokens`.

        On a CPU a small batch takes as little time for each token as a large one. But each kernel call may wait for
        the interpreter lock, and small batches make twice as many calls.
        """
        return min(512 if device.startswith("cpu") else 4096, self.batch_tokens(device, memory_tokens))
