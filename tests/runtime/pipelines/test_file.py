"""Files of pipelines, and the error for each mistake: it names file, stage, key and remedy."""

from __future__ import annotations

from pathlib import Path

import pytest

from staged_pool import ConfigError
from staged_pool.runtime.pipelines.file import read_pipeline, read_pipelines

GOOD = """
window = 8
max_requests = 3
items = "pages"
output = {vector = "vectors.dense"}
stage = [{name = "regions", plugin = "page_regions", expand = true, max_items = 10},
  {name = "vectors", model = "siglip", from = "regions.crop", on_error = "skip", window = 2},
  {name = "topics", task = "classify", model = "nli", candidate_labels = ["a", "b, c"], \
hypothesis_template = "Of {}.", multi_label = true},
  {name = "words", model = "splade", outputs = "sparse", max_active_dims = 5}]
"""


def written(folder: Path, text: str, name: str = "pages.toml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_a_file_says_what_a_program_says(tmp_path: Path) -> None:
    file = read_pipeline(written(tmp_path, GOOD))
    assert (file.name, file.window, file.max_requests, file.items) == ("pages", 8, 3, "pages")
    regions, vectors, topics, words = file.stages
    assert (regions.kind, regions.expand, regions.max_items) == ("plugin", True, 10)
    assert (vectors.engine, vectors.source, vectors.on_error, vectors.window) == ("siglip", "regions.crop", "skip", 2)
    assert (topics.candidate_labels, topics.hypothesis_template, topics.multi_label) == (["a", "b, c"], "Of {}.", True)
    assert words.max_active_dims == 5
    assert list(file.models) == ["siglip", "nli", "splade"]
    assert all(place.startswith(f"{file.path}, stage ") for place in file.models.values())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name = ", "is not TOML"),
        ("window = 3", r"stage: must be tables, each begun by \[\[stage\]\]"),
        ("windows = 3\nstage = [{name = 'a', model = 'm'}]", "windows is no key; did you mean window"),
        ("window = 0\nstage = [{name = 'a', model = 'm'}]", "window = 0: must be a whole number of at least 1"),
        ("name = 'a b'\nstage = [{name = 'a', model = 'm'}]", "name = 'a b': must be a name of letters"),
        ("stage = [{model = 'm'}]", r"\[\[stage\]\] number 1 needs name"),
        ("stage = [{name = 'a', model = 'm', topk = 3}]", "stage a: topk is no key; did you mean top_k"),
        ("stage = [{name = 'a', function = 'f'}]", "stage a: function is no key; functions are for programs"),
        ("stage = [{name = 'a', task = 'rank'}]", "stage a: task = 'rank': must be one of embed, score, maxsim"),
        ("stage = [{name = 'a'}]", "stage a: model = None: the task embed needs a model"),
        (
            "stage = [{name = 'request', model = 'm'}]",
            "a stage needs a name of .* other than request and item",
        ),
        ("stage = [{name = 'a', model = 'm', top_k = 3}]", "the task embed has no top_k; it is for score, maxsim"),
        ("stage = [{name = 'a', model = 'm', on_error = 'ignore'}]", "on_error = 'ignore': must be fail or skip"),
        ("stage = [{name = 'a', plugin = 'p', max_items = 3}]", "max_items = 3: is for a stage with expand"),
        ("stage = [{name = 'a', plugin = 'p', window = '3'}]", "window = '3': must be a whole number of at least 1"),
        ("stage = [{name = 'a', model = 3}]", "model = 3: must be an engine of open_engine, or the name of one"),
        ("stage = [{name = 'a', model = 'm', candidate_labels = 'b'}]", "has no candidate_labels; it is for classify"),
        *(
            (f"stage = [{{name = 'a', task = 'classify', model = 'm', {keys}}}]", f"stage a: {message}")
            for keys, message in (
                ("candidate_labels = 3", "candidate_labels = 3: must be a text or a list of texts"),
                ("candidate_labels = []", r"candidate_labels = \[\]: must be a text or a list of texts"),
                ("candidate_labels = ','", "candidate_labels = ',': candidate_labels has no label"),
                (
                    "candidate_labels = ['b', 'b']",
                    "candidate_labels = .*: Label 1 of candidate_labels stands there twice",
                ),
                (
                    "candidate_labels = 'b', hypothesis_template = 'so'",
                    "hypothesis_template = 'so': .* {} exactly once",
                ),
                ("candidate_labels = 'b', hypothesis_template = 1", "hypothesis_template = 1: must be a text"),
                ("candidate_labels = 'b', multi_label = 1", "multi_label = 1: must be true or false"),
                ("multi_label = true", "multi_label = True: is for candidate_labels, which are missing"),
                ("hypothesis_template = '{}'", "hypothesis_template = '{}': is for candidate_labels"),
                (
                    "candidate_labels = 'b', from = ['item', 'request.labels']",
                    "candidate_labels = 'b': from has labels",
                ),
                ("from = ['item', 'request.labels'], hypothesis_template = 'so'", "hypothesis_template = 'so': "),
            )
        ),
        (
            "stage = [{name = 'a', model = 'm', max_active_dims = 3}]",
            r'is for sparse vectors; write outputs = \["sparse"\]',
        ),
        (
            "stage = [{name = 'a', model = 'm', outputs = 'sparse', max_active_dims = 0}]",
            "max_active_dims = 0: must be a whole number of at least 1",
        ),
        ("stage = [{name = 'a', model = 'm', from = []}]", r"from = \[\]: must be a text or a list of texts"),
    ],
)
def test_each_mistake_in_a_file_has_its_error(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as failure:
        read_pipeline(written(tmp_path, text))
    assert str(failure.value).startswith(str(tmp_path / "pages.toml"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "stage = [{name = 'a', model = 'm'}]",
            "model = 'm': no model of this name is served; there are none",
        ),
        ("stage = [{name = 'a', plugin = 'p'}]", "stage a: plugin = 'p': no plugin of this name is served"),
        (
            "stage = [{name = 'a', task = 'maxsim', from = ['request.query', 'b']}]",
            "stage a: from = 'b': no earlier stage has this name; known here: item, request",
        ),
        ("stage = [{name = 'a', task = 'maxsim', from = 'item'}]", "the task maxsim takes a query and an item"),
        ("stage = [{name = 'a', task = 'maxsim', from = ['request', 'item']}]", "must name a field of the request"),
        (
            "output = 'c'\nstage = [{name = 'a', task = 'maxsim', from = ['request.query', 'item']}]",
            "output = 'c': no earlier stage has this name",
        ),
    ],
)
def test_what_does_not_fit_the_models_or_the_other_stages_has_its_error(
    tmp_path: Path, text: str, message: str
) -> None:
    file = read_pipeline(written(tmp_path, text))
    with pytest.raises(ConfigError, match=message) as failure:
        file.build({})
    assert str(failure.value).startswith(str(file.path))


def test_two_pipelines_of_one_name_and_a_missing_file_are_rejected(tmp_path: Path) -> None:
    one, other = written(tmp_path, GOOD), written(tmp_path, f'name = "pages"\n{GOOD}', "other.toml")
    with pytest.raises(ConfigError, match="has this name; name them apart"):
        read_pipelines([one, other])
    with pytest.raises(ConfigError, match=r"pipeline='.*gone\.toml': cannot be read \(No such file"):
        read_pipelines([tmp_path / "gone.toml"])
