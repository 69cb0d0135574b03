"""``mtplx chat`` in a pseudo-terminal: what a user sees and what the server is asked."""

from __future__ import annotations

import os
import re
import sys

import pexpect
import pytest

from tests.models.gguf_files import tiny_llama
from tests.models.test_load import saved
from tests.server.conftest import Server
from tests.server.fakes import ANSWER, INFO, FakeEngine

COMMAND = ["-c", "from mtplx.cli.main import main; main()", "chat"]
WORDS = "".join(ANSWER).strip()
COST = r"(\d+) cached \+ (\d+) new · first token [\d.]+ s"
TIMEOUT_S = 60


@pytest.fixture
def server():
    running = Server(FakeEngine())
    yield running
    running.engine.open_gate()
    running.stop()


@pytest.fixture
def terminal(tmp_path):
    """Return a function that starts the command in a terminal of its own."""
    opened = []

    def start(*arguments):
        environment = os.environ | {
            "HOME": str(tmp_path),
            "XDG_CONFIG_HOME": str(tmp_path),
            "TERM": "xterm",
            "NO_COLOR": "1",
        }
        child = pexpect.spawn(
            sys.executable,
            [*COMMAND, *map(str, arguments)],
            timeout=TIMEOUT_S,
            encoding="utf-8",
            dimensions=(40, 200),
            env=environment,
        )
        opened.append(child)
        return child

    yield start
    for child in opened:
        child.close(force=True)


@pytest.fixture
def chat(server, terminal):
    child = terminal("--url", server.url)
    child.expect(re.escape(f"{INFO.name} at {server.url}"))
    child.expect("> ")
    return child


def said(server):
    """Return the messages of the last request."""
    return [(m["role"], m["content"]) for m in server.tokenizer.messages]


def test_an_answer_streams_and_says_what_it_cost(chat, server):
    chat.sendline("Hello")
    chat.expect(WORDS)
    chat.expect(COST)
    assert int(chat.match[1]) + int(chat.match[2]) == len(
        server.engine.requests[-1].prompt.token_ids
    )
    chat.sendline("And now?")
    chat.expect(WORDS)
    chat.expect(COST)
    assert int(chat.match[1]) > 0, "the second turn restores the first"
    assert said(server) == [
        ("user", "Hello"),
        ("assistant", "".join(ANSWER)),
        ("user", "And now?"),
    ]
    chat.sendline("/quit")
    chat.expect(pexpect.EOF)
    assert chat.wait() == 0


def test_retry_and_new(chat, server):
    chat.sendline("/retry")
    chat.expect("Nothing was asked yet")
    chat.sendline("Hello")
    chat.expect(COST)
    chat.sendline("/retry")
    chat.expect(WORDS)
    chat.expect(COST)
    assert said(server) == [("user", "Hello")]
    chat.sendline("/new")
    chat.expect("A new conversation")
    chat.sendline("Again")
    chat.expect(COST)
    assert said(server) == [("user", "Again")]
    chat.sendline("/what")
    chat.expect("/quit ends it")
    chat.sendeof()
    chat.expect(pexpect.EOF)


def test_ctrl_c_stops_the_answer_and_nothing_else(chat, server):
    engine = server.engine
    engine.gate.clear()
    chat.sendline("Hello")
    engine.wait_submitted()
    chat.expect("Reading the prompt")
    chat.sendintr()
    chat.expect("stopped")
    chat.expect("> ")
    engine.wait_idle()
    engine.open_gate()
    chat.sendline("Still there?")
    chat.expect(WORDS)
    chat.expect(COST)
    assert said(server) == [("user", "Still there?")]


def test_ctrl_c_at_the_prompt_says_how_to_leave(chat):
    chat.sendintr()
    chat.expect("/quit ends it")
    chat.sendline("Hello")
    chat.expect(WORDS)


def test_what_the_model_says_does_not_drive_the_terminal(chat, server):
    server.engine.answer = ("a\x1b[31m", "\x07b", "<think>c</think>", "d")
    chat.sendline("Hello")
    chat.expect(r"a\[31mb")
    assert "\x07" not in chat.before


def test_what_the_server_refuses_is_told(server, terminal):
    child = terminal("other-model", "--url", server.url)
    child.expect("> ")
    child.sendline("Hello")
    child.expect(re.escape(f"'other-model' is not served here; use '{INFO.name}'"))
    child.expect("> ")


def test_options_and_system_prompt_are_sent(server, terminal):
    child = terminal(
        "--url", server.url, "--system", "Be kind.", "--temperature", 0, "--max-tokens", 2
    )
    child.expect("> ")
    child.sendline("Hello")
    child.expect("w0 w1")
    child.expect(COST)
    assert said(server) == [("system", "Be kind."), ("user", "Hello")]
    request = server.engine.requests[-1]
    assert (request.max_new_tokens, request.sampling.temperature) == (2, 0)


def test_an_address_where_nobody_is(terminal):
    child = terminal("--url", "http://127.0.0.1:9")
    child.expect("mtplx: Nobody answers at http://127.0.0.1:9")
    child.expect(pexpect.EOF)
    assert child.wait() == 1


def test_a_server_of_its_own(tmp_path, terminal):
    folder = saved(tmp_path / "tiny", tiny_llama())
    template = "{% for message in messages %}{{ message.content }}\n{% endfor %}"
    (folder / "chat_template.jinja").write_text(template)
    # Nobody listens on port 1.
    child = terminal(folder, "--port", 1, "--max-tokens", 3, "--device", "cpu")
    child.expect(r"tiny at http://127\.0\.0\.1:(\d+)")
    child.expect("> ")
    child.sendline("Hello")
    child.expect(r"0 cached \+ \d+ new")
    child.sendline("/quit")
    child.expect(pexpect.EOF)
    assert child.wait() == 0
