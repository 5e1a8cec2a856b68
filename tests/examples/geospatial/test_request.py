"""Requests of segmentations, right and wrong."""

from __future__ import annotations

from typing import Any

import pytest

from geo_segmentation.request import parse_request
from staged_pool import InvalidInput

URL = "https://example.org/scene.tif"


def test_a_url_alone_is_a_request() -> None:
    request = parse_request({"data": URL})
    assert (request.sources, request.format, request.indices) == ((URL,), "url", None)
    assert request.place(0) == "data.data"


def test_the_fields_of_terratorch_are_read() -> None:
    request = parse_request(
        {"data": "/a.tif", "data_format": "path", "out_data_format": "b64_json", "indices": [1, 2, 3, 8, 11, 12]}
    )
    assert (request.sources, request.format, request.indices) == (("/a.tif",), "path", (1, 2, 3, 8, 11, 12))


def test_a_list_has_places() -> None:
    request = parse_request({"data": [URL, f"{URL}?2"]})
    assert request.sources == (URL, f"{URL}?2")
    assert request.place(1) == "data.data[1]"


@pytest.mark.parametrize(
    ("data", "param", "says"),
    [
        (URL, "data", "must be an object, such as"),
        ([URL], "data", "must be an object"),
        ({"data": URL, "out_path": "/tmp"}, "data", "may have the fields data, data_format, indices, out_data_format"),
        ({"data": URL, "data_format": "bytes"}, "data.data_format", "must be one of url, path, b64_json"),
        ({"data": URL, "data_format": ["url"]}, "data.data_format", "must be one of"),
        ({"data": URL, "out_data_format": "path"}, "data.out_data_format", "this server writes no files"),
        ({}, "data.data", "must be a text, or a list of texts"),
        ({"data": 5}, "data.data", "must be a text"),
        ({"data": ""}, "data.data", "must be a text"),
        ({"data": [URL, None]}, "data.data", "must be a text"),
        ({"data": []}, "data.data", "must have 1 to 16 GeoTIFFs, and has 0"),
        ({"data": [URL] * 17}, "data.data", "and has 17"),
        ({"data": "a.tif", "data_format": "path"}, "data.data", "must be an absolute path"),
        ({"data": URL, "indices": [0, 1, 2]}, "data.indices", "must be 6 integers from 0: the places of blue, green"),
        ({"data": URL, "indices": [0, 1, 2, 3, 4, -1]}, "data.indices", "must be 6 integers"),
        ({"data": URL, "indices": [0, 1, 2, 3, 4, True]}, "data.indices", "must be 6 integers"),
        ({"data": URL, "indices": [0, 1, 2, 3, 4, 5.0]}, "data.indices", "must be 6 integers"),
        ({"data": URL, "indices": "012345"}, "data.indices", "must be 6 integers"),
        ({"data": URL, "indices": [0, 1, 2, 3, 4, 10**9]}, "data.indices", "must be 6 integers"),
    ],
)
def test_a_wrong_field_is_named_with_its_remedy(data: Any, param: str, says: str) -> None:
    with pytest.raises(InvalidInput) as raised:
        parse_request(data)
    assert raised.value.param == param
    assert str(raised.value).startswith(param)
    assert says in str(raised.value)
