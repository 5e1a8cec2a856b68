"""BentoML with adaptive batching, after its documentation ("Adaptive batching", "Sentence Transformers").

Run by `bentoml serve`. One worker, for there is one device. A batch is counted in texts here, not in requests; a
batchable API takes one list and gives one back, so the answer is a bare list of vectors in base64.
"""

import base64
import os

import bentoml

MAX_BATCH_TEXTS = 64
REQUEST_TIMEOUT_S = 120


@bentoml.service(workers=1, traffic={"timeout": REQUEST_TIMEOUT_S})
class Embedding:
    """Answers batches of texts."""

    def __init__(self) -> None:
        import torch
        from sentence_transformers import SentenceTransformer

        torch.set_num_threads(int(os.environ["PEER_THREADS"]))
        dtype = {"dtype": os.environ["PEER_DTYPE"]}
        self.model = SentenceTransformer(os.environ["PEER_MODEL"], device="cpu", model_kwargs=dtype)

    @bentoml.api(route="/v1/embeddings", batchable=True, max_batch_size=MAX_BATCH_TEXTS)
    def embed(self, texts: list[str]) -> list[str]:
        vectors = self.model.encode(texts, show_progress_bar=False)
        return [base64.b64encode(vector.tobytes()).decode() for vector in vectors]
