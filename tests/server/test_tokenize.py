"""``/tokenize`` and ``/detokenize``, in vLLM's spelling and in llama.cpp's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from fastapi.testclient import TestClient

from tests.server.conftest import INFO
from tests.server.fakes import BEGIN, FakeEngine
from tests.server.small_app import small_client

HELLO = [*b"Hello"]
CHAT = [{"role": "user", "content": "Hi"}]


@pytest.fixture
def http() -> Iterator[TestClient]:
    engine = FakeEngine()
    yield small_client(engine)
    engine.close()


@pytest.mark.parametrize("prefix", ["", "/v1"])
@pytest.mark.parametrize(
    ("body", "tokens"),
    [
        ({"prompt": "Hello"}, [BEGIN, *HELLO]),
        ({"prompt": "Hello", "add_special_tokens": False}, HELLO),
        ({"prompt": "", "model": INFO.name}, [BEGIN]),
        ({"content": "Hello", "with_pieces": False, "parse_special": True}, HELLO),
        ({"content": "Hello", "add_special": True}, [BEGIN, *HELLO]),
        ({"messages": CHAT}, [*b"<user>Hi\n<assistant>"]),
        (
            {"messages": [{"role": "assistant", "content": "Hi"}]}
            | {"continue_final_message": True, "add_generation_prompt": False},
            [*b"<assistant>Hi"],
        ),
    ],
)
def test_tokenize(
    http: TestClient, prefix: str, body: dict[str, Any], tokens: list[int]
) -> None:
    answer = http.post(f"{prefix}/tokenize", json=body)
    assert answer.json() == {
        "count": len(tokens),
        "max_model_len": INFO.context_length,
        "tokens": tokens,
        "token_strs": None,
    }


@pytest.mark.parametrize("body", [{"prompt": "Hé"}, {"messages": CHAT}])
def test_the_texts_of_tokens(http: TestClient, body: dict[str, Any]) -> None:
    told = http.post("/tokenize", json=body | {"return_token_strs": True}).json()
    assert len(told["token_strs"]) == told["count"]
    assert "H" in told["token_strs"]


@pytest.mark.parametrize("prefix", ["", "/v1"])
def test_detokenize(http: TestClient, prefix: str) -> None:
    body = {"tokens": [*"Grüße 🙂".encode(), 0xF0]}
    text = "Grüße 🙂\ufffd"
    answer = http.post(f"{prefix}/detokenize", json=body)
    assert answer.json() == {"prompt": text, "content": text}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "content": "a"}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        (
            "/tokenize",
            {"content": "a", "add_special": True, "add_special_tokens": True},
            "add_special",
        ),
        ("/tokenize", {"content": "a", "with_peaces": True}, "with_peaces"),
        ("/tokenize", {"content": "a", "with_pieces": True}, "with_pieces"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"prompt": "forbidden"}, "messages"),
        ("/tokenize", {"prompt": "a", "model": "other"}, "model"),
        ("/tokenize", {"messages": CHAT, "model": "other"}, "model"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
        ("/detokenize", {"tokens": [1, True]}, "tokens[1]"),
        ("/detokenize", {"tokens": [1, -1]}, "tokens[1]"),
        ("/detokenize", {"tokens": [INFO.vocab_size]}, "tokens[0]"),
        ("/detokenize", {"tokens": [1], "model": "other"}, "model"),
    ],
)
def test_what_is_refused(
    http: TestClient, path: str, body: dict[str, Any], param: str
) -> None:
    answer = http.post(path, json=body)
    assert answer.status_code == (404 if param == "model" else 400)
    assert answer.json()["error"]["param"] == param
