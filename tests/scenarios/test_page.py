"""The page at ``/`` in a real browser, before a real server.

The model is tiny and its words are noise; it computes one forward for each permit, so
that a test decides how far a prompt or an answer is. What no model would say comes from
the scripted engine.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import mlx.nn as nn
import pytest

from mtplx.config import Settings, read_configuration
from mtplx.engine import Engine
from mtplx.models import Model
from mtplx.server.app import build_app
from mtplx.server.run import HttpServer, reserve
from mtplx.session import SessionBank
from tests.engine.conversation import chat_model_of
from tests.scenarios.browser import ARGUMENTS, CHROMIUM, Window, skip_without_browser
from tests.server.conftest import Server

INSTRUCTIONS = "You are a patient teacher of geography, and you like short sentences."
SPAN_TOKENS = 32
SPECIAL = "<|bos|><|im_start|><|im_end|>"


class PacedNetwork(nn.Module):
    """A network that computes freely, or one forward for each permit, and that never
    says some tokens."""

    def __init__(self, network: nn.Module, unsaid: list[int]) -> None:
        super().__init__()
        self.network = network
        self.unsaid = unsaid
        self.free = threading.Event()
        self.free.set()
        self.permits: queue.SimpleQueue[None] = queue.SimpleQueue()

    def __call__(self, inputs: Any, cache: Any = None) -> Any:
        if not self.free.is_set():
            self.permits.get()
        logits = self.network(inputs, cache=cache)
        logits[..., self.unsaid] = -1e9
        return logits

    @property
    def layers(self) -> Any:
        return self.network.layers


class Site:
    """A server with the tiny model."""

    def __init__(self) -> None:
        plain = chat_model_of("llama")
        # Without them an answer ends when it is to.
        special = plain.tokenizer.encode(SPECIAL, add_special_tokens=False)
        self.network = PacedNetwork(plain.network, special)
        model = Model(self.network, plain.config, plain.tokenizer, name="tiny")
        settings = {"prefill_window": SPAN_TOKENS}
        configuration = read_configuration(settings, environment={"HOME": "/nowhere"})
        self.engine = Engine(lambda: model, SessionBank(), Settings(**settings))
        self.engine.start()
        app = build_app(
            engine=self.engine,
            tokenizer=self.engine.tokenizer,
            info=self.engine.info,
            configuration=configuration,
        )
        started = threading.Event()
        self._http = HttpServer(
            app, reserve("127.0.0.1", 0), on_started=lambda url: started.set()
        )
        self.url = self._http.url
        self._thread = threading.Thread(target=self._http.run, daemon=True)
        self._thread.start()
        assert started.wait(10)

    def hold_up(self) -> None:
        """Compute nothing more without a permit."""
        self.network.free.clear()

    def step(self) -> None:
        """Let one more forward happen, once the last one does."""
        if self.network.permits.empty():
            self.network.permits.put(None)

    def go_on(self) -> None:
        self.network.free.set()
        self.step()

    def stop(self) -> None:
        self.go_on()
        self._http.stop()
        self._thread.join(10)
        self.engine.stop()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    skip_without_browser()
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=str(CHROMIUM), args=ARGUMENTS)
        yield running
        running.close()


@pytest.fixture
def site(browser: Any) -> Iterator[Site]:
    site = Site()
    yield site
    site.stop()


@pytest.fixture
def look(browser: Any) -> Iterator[Callable[..., Window]]:
    """Open windows; they must not have complained, nor asked anybody else."""
    windows: list[Window] = []

    def open_window(url: str, width: int = 1280, height: int = 820, **more: Any) -> Window:
        size = {"width": width, "height": height}
        windows.append(Window(browser, url, viewport=size, **more))
        return windows[-1]

    yield open_window
    for window in windows:
        assert window.complaints == []
        assert all(asked.startswith(window.url) for asked in window.asked)
        window.close()


@contextmanager
def scripted(*answer: str, **settings: Any) -> Iterator[Server]:
    server = Server(**settings)
    if answer:
        server.engine.answer = answer
    try:
        yield server
    finally:
        server.stop()


def test_a_chat_streams_and_says_what_it_cost(
    site: Site, look: Callable[..., Window]
) -> None:
    window = look(site.url)
    window.until(lambda: "tiny" in window.text("#served"))
    window.set(longest=6)
    site.hold_up()
    window.send("What is the capital of France?")
    window.until(lambda: window.text(".answer .text"), site.step)
    assert window.answered == 0
    assert window.page.is_visible("#stop")
    site.go_on()
    window.until(lambda: window.answered == 1)
    facts = window.texts(".answer .facts li")
    assert facts[0] == "0 cached"
    assert facts[1].endswith(" new")
    assert facts[-2:] == ["6 tokens", "cut at the limit"]
    assert any(fact.endswith("to first token") for fact in facts)
    assert any(fact.endswith("tok/s") for fact in facts)

    window.send("And of Spain?")
    window.until(lambda: window.answered == 2)
    cached, *_ = window.texts(".answer:last-child .facts li")
    assert int(cached.removesuffix(" cached")) > 0


def test_a_long_prompt_shows_how_far_it_is(site: Site, look: Callable[..., Window]) -> None:
    window = look(site.url)
    window.set(instructions=INSTRUCTIONS)
    window.send("Hello.")
    window.until(lambda: window.answered == 1)
    site.hold_up()
    window.send("Read this. " * 40)
    told = ".answer:last-child .told"
    window.until(lambda: "of them restored" in window.text(told))
    before = window.text(told)
    site.step()
    window.until(lambda: window.text(told) != before)
    site.step()
    done, _, whole = window.text(told).split()[:3]
    assert 0 < int(done) < int(whole)
    assert float(window.page.get_attribute(".answer:last-child progress", "value")) < 1
    site.go_on()
    window.until(lambda: window.answered == 2)
    assert not window.page.is_visible(told)


def test_an_answer_can_be_stopped_and_asked_for_again(
    site: Site, look: Callable[..., Window]
) -> None:
    window = look(site.url)
    window.set(longest=500)
    site.hold_up()
    window.send("Tell me a long story.")
    window.until(lambda: window.text(".answer .text"), site.step)
    window.page.click("#stop")
    window.until(lambda: window.answered == 1, site.step)
    assert window.text(".answer .problem") == "Stopped."
    site.go_on()
    window.set(longest=5)
    window.page.press("#max-tokens", "Tab")
    window.page.get_by_role("button", name="Retry").click()
    window.until(lambda: "5 tokens" in window.texts(".answer .facts li"))
    assert window.page.locator(".answer").count() == 1


def test_conversations_are_kept_in_the_browser(
    site: Site, look: Callable[..., Window]
) -> None:
    window = look(site.url)
    for question in ("First question", "Second question"):
        window.page.click("#new")
        window.set()
        window.send(question)
        window.until(lambda: window.answered == 1)
    answer = window.text(".answer .text")
    window.page.reload()
    window.until(lambda: window.answered == 1)
    assert window.texts("#conversations .name") == ["Second question", "First question"]
    assert window.text(".answer .text") == answer
    window.page.click("text=First question")
    assert window.text(".user .text") == "First question"
    window.page.get_by_role("button", name="Delete First question").click()
    window.until(lambda: window.texts("#conversations .name") == ["Second question"])


def test_the_live_view_shows_both_streams_and_what_they_share(
    site: Site, look: Callable[..., Window]
) -> None:
    window = look(site.url)
    site.hold_up()
    for question in ("Where is Peru?", "Where is Mali?"):
        window.page.click("#new")
        window.set(instructions=INSTRUCTIONS, longest=200)
        window.send(question)
        window.until(lambda: window.text(".answer:last-child .text"), site.step)
    window.page.get_by_role("tab", name="Live").click()

    def rows() -> list[str]:
        return window.texts("#streams tbody tr")

    window.until(lambda: sum("answering" in row for row in rows()) == 2, site.step)
    assert any("Where is Peru?" in row for row in rows())
    assert any("Where is Mali?" in row for row in rows())
    window.until(lambda: window.text("#tile-running") == "2", site.step)
    window.until(lambda: "in use by 2 requests" in window.text("#memory-words"), site.step)

    site.go_on()
    window.until(lambda: window.page.locator("#requests li").count() == 2)
    window.until(lambda: window.text("#tile-running") == "0")
    window.page.click("text=As a table")
    window.until(lambda: len(window.texts("#tree-table tbody tr")) == 3)
    shared, *branches = window.texts("#tree-table tbody tr")
    span = shared.split()[0]
    assert span.startswith("0–")
    assert "restored" not in shared
    assert "1 time" in shared
    assert all(span in branch for branch in branches)
    assert all(f"{span.removeprefix('0–')}–" in branch for branch in branches)
    assert window.page.locator("#tree svg .run").count() == 3
    assert window.texts("#requests .why") == [
        "It goes on differently from what was kept, from token "
        f"{span.removeprefix('0–')} on: "
        + window.texts("#requests .why")[0].partition(" on: ")[2],
        "Nothing that begins like it was read before.",
    ]


def test_nobody_is_watched_for_while_the_live_view_is_hidden(
    look: Callable[..., Window],
) -> None:
    with scripted() as server:
        window = look(server.url)
        window.until(lambda: window.text("#served"))
        assert server.engine.sinks == []
        window.page.get_by_role("tab", name="Live").click()
        window.until(lambda: len(server.engine.sinks) == 1)
        window.page.get_by_role("tab", name="Chat").click()
        window.until(lambda: not server.engine.sinks)


def test_a_wrong_key_is_a_clear_message(look: Callable[..., Window]) -> None:
    with scripted(api_key="right") as server:
        window = look(server.url)
        window.until(lambda: window.page.is_visible("#key"))
        assert "asks for an API key" in window.text("#key-said")
        window.page.fill("#key", "wrong")
        window.page.press("#key", "Enter")
        window.until(lambda: "does not know this key" in window.text("#key-said"))
        window.page.fill("#key", "right")
        window.page.press("#key", "Enter")
        window.until(lambda: not window.page.is_visible("#key"))
        window.send("Hello")
        window.until(lambda: window.answered == 1)
        assert window.text(".answer .text") == "w0 w1 w2 w3 w4"
        window.page.get_by_role("tab", name="Live").click()
        window.until(lambda: len(server.engine.sinks) == 1)
        window.page.reload()
        window.until(lambda: len(server.engine.sinks) == 1)
        window.page.evaluate("localStorage.clear()")


HOSTILE = (
    "[fine](https://example.com/) <a href='https://example.com/' id=top class=top "
    "style='position:fixed'>x</a> [bad](vbscript:1) "
    "![picture](http://127.0.0.1:9/stolen.png)\n\n",
    "\n\n```html\n<script>window.hacked = 8</script>\n```\n\n",
    "\n\n| a | b |\n|---|---|\n| " + "wide " * 300 + " | b |\n\n",
    "<script>window.hacked = 1</script>",
    "<img src=/health onerror='window.hacked = 2'>",
    "<iframe srcdoc='<script>parent.hacked = 3</script>'></iframe>",
    "<svg onload='window.hacked = 4'><style>body { display: none }</style></svg>",
    "[click](javascript:window.hacked=5) [data](data:text/html,<script>hacked=6</script>)",
    "<form action='http://127.0.0.1:9/'><input name=a autofocus onfocus='hacked=7'></form>",
    "<math><mtext><table><mglyph><style><!--</style><img title='--><img src=1 onerror=x>'>",
    "\u202e\u2067 שלום עולם \u202d مرحبا \u2069",
    "\ufffd\ud83d\udc00 \x00\x1b[31m\x07",
    "\n\n" + "x" * 150_000,
    "&lt;script&gt;",
)


def test_a_hostile_answer_harms_nothing(look: Callable[..., Window]) -> None:
    with scripted(*HOSTILE) as server:
        window = look(server.url, width=390, height=844)
        window.send("Be hostile")
        window.until(lambda: window.answered == 1)
        assert window.page.evaluate("window.hacked") is None
        text = ".answer .text"
        for tag in ("script", "img", "iframe", "style", "form", "input", "svg", "math"):
            assert window.page.locator(f"{text} {tag}").count() == 0, tag
        assert (
            window.page.locator(f"{text} [style], {text} [id], {text} [onerror]").count()
            == 0
        )
        links = window.page.locator(f"{text} a[href]").all()
        assert [link.get_attribute("href") for link in links] == [
            "https://example.com/",
            "http://127.0.0.1:9/stolen.png",
        ]
        for link in links:
            assert link.get_attribute("rel") == "noopener noreferrer nofollow"
            assert link.get_attribute("class") is None
        assert "window.hacked = 8" in window.text(f"{text} pre")
        assert "<script>window.hacked = 1</script>" in window.text(text)
        assert not window.overflows


def test_an_answer_beyond_all_bounds_is_shown_as_it_is(look: Callable[..., Window]) -> None:
    with scripted() as server:
        window = look(server.url)
        bounds = ("> " * 5000, "- " * 5000, "[" * 20_000, "y" * 250_000)
        for answer in bounds:
            server.engine.answer = (answer, "<b>bold</b>")
            window.page.click("#new")
            window.send("Be hostile")
            window.until(lambda: window.answered == 1)
            assert "bold" in window.text(".answer:last-child .text")
        assert window.text(".answer:last-child .text").endswith("<b>bold</b>")
        server.engine.answer = ("**fine**",)
        window.page.click("#new")
        window.send("Be nice")
        window.until(lambda: window.answered == 1)
        assert window.text(".answer strong") == "fine"
        assert not window.overflows


def test_a_failure_is_told_in_the_server_s_words(look: Callable[..., Window]) -> None:
    with scripted() as server:
        window = look(server.url)
        window.send("x" * 500)
        window.until(lambda: window.answered == 1)
        assert "maximum context length is 400 tokens" in window.text(".answer .problem")
        # A browser notes a status of 400 in its console.
        assert all("400 (Bad Request)" in each for each in window.complaints)
        window.complaints.clear()


@pytest.mark.parametrize("width", [390, 720, 1280, 1900])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_every_window(look: Callable[..., Window], width: int, scheme: str) -> None:
    with scripted("word " * 40, "\n\n```\n" + "code " * 80 + "\n```\n") as server:
        window = look(server.url, width=width, color_scheme=scheme)
        window.send("A long question, " * 20)
        window.until(lambda: window.answered == 1)
        assert not window.overflows
        window.page.get_by_role("tab", name="Live").click()
        window.until(lambda: window.page.locator("#requests li").count() == 1)
        window.until(lambda: window.page.locator("#tree svg").count() == 1)
        assert not window.overflows
        background = window.page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, background[4:-1].split(","))) > 384) == (scheme == "light")


def test_the_switch_of_colours_is_kept(look: Callable[..., Window]) -> None:
    with scripted() as server:
        window = look(server.url, color_scheme="light")
        for said in ("Light", "Dark"):
            window.page.click("#theme")
            assert window.text("#theme") == said
        window.page.reload()
        assert window.page.get_attribute("html", "data-theme") == "dark"


def test_it_can_be_used_with_the_keyboard_alone(look: Callable[..., Window]) -> None:
    with scripted("w0") as server:
        window = look(server.url)
        window.until(lambda: window.text("#served"))
        window.page.focus("#tab-chat")
        window.page.keyboard.press("ArrowRight")
        assert window.page.get_attribute("#tab-live", "aria-selected") == "true"
        window.page.keyboard.press("ArrowLeft")
        assert window.page.is_visible("#message")
        reached = set()
        for _ in range(12):
            window.page.keyboard.press("Tab")
            reached.add(window.page.evaluate("document.activeElement.id"))
        assert {"theme", "new", "scroll", "message", "send"} <= reached
        window.page.focus("#message")
        window.page.keyboard.type("Hello")
        window.page.keyboard.press("Enter")
        window.until(lambda: window.answered == 1)
        assert window.text("#said") == "Answer complete, 1 token."
        unnamed = window.page.evaluate(
            "[...document.querySelectorAll('button, input, textarea, select, canvas')]"
            ".filter((each) => !(each.labels?.length || each.textContent.trim()"
            " || each.ariaLabel)).map((each) => each.id)"
        )
        assert unnamed == []
