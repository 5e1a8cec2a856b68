"""Work on texts: many share a request, and a wrong one fails alone."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeAlias

from staged_pool.api.bulk.patience import until_admitted
from staged_pool.api.bulk.texts import TextAnswer, TextLine
from staged_pool.api.status import problem
from staged_pool.runtime.results import ClassifyResult, EmbedResult
from staged_pool.stages.errors import REQUEST_SETTINGS, InvalidInput, ModelFailed, StagedPoolError

TextCall: TypeAlias = Callable[[Sequence[str]], Awaitable[EmbedResult | ClassifyResult]]
"""Embeds or classifies texts, as the methods of an engine and of a client do."""


class TextWork:
    """Answers lines of texts.

    Args:
        call: Asks the model about the texts of one group.
    """

    def __init__(self, call: TextCall) -> None:
        self._call = call

    async def do(self, lines: Sequence[TextLine]) -> Sequence[TextAnswer]:
        """Answer the texts; see `Work.do`.

        A text that the error of its request names fails alone, and the others are asked about again. If the error
        names none, the request is repeated in halves.

        Raises:
            InvalidInput: A setting of all texts is wrong, such as `candidate_labels`.
            StagedPoolError: The model can go on no more.
        """
        answers = [_refused(line) for line in lines if line.fault]
        asked = [[line for line in lines if not line.fault]]
        while asked:
            some = asked.pop()
            if not some:
                continue
            try:
                answers += await self._ask(some)
            except (InvalidInput, ModelFailed) as error:
                wrong = error.index if error.index is not None else 0 if len(some) == 1 else None
                if isinstance(error, InvalidInput) and error.param in REQUEST_SETTINGS:
                    raise
                if wrong is None:
                    asked += [some[: len(some) // 2], some[len(some) // 2 :]]
                else:
                    answers.append(_failed(some[wrong], error))
                    asked.append([*some[:wrong], *some[wrong + 1 :]])
        return answers

    async def _ask(self, lines: Sequence[TextLine]) -> Sequence[TextAnswer]:
        result = await until_admitted(lambda: self._call([line.text for line in lines]))
        rows, labels = (result.embeddings, None) if isinstance(result, EmbedResult) else (result.scores, result.labels)
        return [TextAnswer(line.number, row, labels) for line, row in zip(lines, rows, strict=True)]


def _refused(line: TextLine) -> TextAnswer:
    return TextAnswer(line.number, error={"message": line.fault, "type": "BadRequestError", "param": None, "code": 400})


def _failed(line: TextLine, error: StagedPoolError) -> TextAnswer:
    found = problem(error)
    fields = {"message": found.message, "type": found.kind.type, "param": found.param, "code": found.status}
    return TextAnswer(line.number, error=fields)
