"""``mtplx chat``: a conversation in the terminal, with a server that runs or one of its
own.

What the model says goes to stdout, what is said about it in dim letters beside it. The
server of its own runs in this process, so that Ctrl-C reaches only the answer, and
nothing is left behind at the end.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any

import typer
from rich.console import Console

from mtplx.cli.client import Client, ServerError, Unreachable, address, first_key
from mtplx.cli.options import (
    ConfigFile,
    Device,
    Dtype,
    Model,
    configure,
    console,
    flag,
)
from mtplx.config import Configuration

_HELP = "/new begins anew, /retry asks again, /quit ends it; Ctrl-C stops an answer."


def chat(
    model: Model = None,
    system: Annotated[str | None, typer.Option(help="System prompt.")] = None,
    temperature: Annotated[
        float | None, typer.Option(help="0 gives the same answer each time.")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(help="Longest answer, in tokens.")
    ] = None,
    url: Annotated[
        str | None,
        typer.Option(help="Where the server is (default: as the settings say)."),
    ] = None,
    host: Annotated[str | None, flag("host")] = None,
    port: Annotated[int | None, flag("port")] = None,
    api_key: Annotated[str | None, flag("api_key")] = None,
    device: Device = None,
    dtype: Dtype = None,
    log_level: Annotated[str | None, flag("log_level")] = None,
    config: ConfigFile = None,
) -> None:
    """Talk to a running server, or start one where none answers."""
    flags = {
        "model": model,
        "host": host,
        "port": port,
        "api_key": api_key,
        "device": device,
        "dtype": dtype,
        # The log of a server of its own would stand between question and answer.
        "log_level": log_level or "warning",
    }
    configuration = configure(config, **flags)
    settings = configuration.settings
    options = {"temperature": temperature, "max_tokens": max_tokens}
    with contextlib.ExitStack() as stack:
        client = Client(url or address(settings), first_key(settings))
        stack.callback(lambda: client.close())
        try:
            models = client.models()
        except Unreachable:
            if url is not None:
                raise
            own = configure(config, **(flags | {"host": "127.0.0.1", "port": 0}))
            client.close()
            client = Client(stack.enter_context(_own_server(own)), first_key(settings))
            models = client.models()
        named = configuration.sources["model"] != "default"
        conversation = Conversation(
            client,
            settings.model if named else models[0]["id"],
            system,
            {name: value for name, value in options.items() if value is not None},
        )
        console.print(
            f"{models[0]['id']} at {client.url}. {_HELP}", style="dim", highlight=False
        )
        _talk(conversation)


@contextlib.contextmanager
def _own_server(configuration: Configuration) -> Iterator[str]:
    """Run a server on a thread and yield its URL."""
    from mtplx.cli.serve import running

    with running(configuration, banner=False) as server:
        thread = threading.Thread(target=server.http.run, name="mtplx-http")
        thread.start()
        try:
            yield server.http.url
        finally:
            server.http.stop()
            thread.join()


def _talk(conversation: Conversation) -> None:
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - gives `input` editing and a history.
    while True:
        try:
            said = input("> ").strip()
        except EOFError:
            return
        except KeyboardInterrupt:
            console.print(f"\n{_HELP}", style="dim", highlight=False)
            continue
        try:
            match said:
                case "":
                    continue
                case "/quit" | "/exit":
                    return
                case "/new":
                    conversation.forget()
                    console.print("A new conversation.", style="dim")
                case "/retry":
                    conversation.retry()
                case _ if said.startswith("/"):
                    console.print(_HELP, style="dim", highlight=False)
                case _:
                    conversation.ask(said)
        except ServerError as error:
            console.print(str(error), style="red", highlight=False, markup=False)


@dataclass
class Conversation:
    """Messages, and the server that answers them.

    Attributes:
        client, model: Who answers.
        system: System prompt, or None.
        options: Further fields of each request.
        messages: So far, without the system prompt.
    """

    client: Client
    model: str
    system: str | None
    options: dict[str, Any]
    messages: list[dict[str, str]] = field(default_factory=list)

    def forget(self) -> None:
        """Begin anew."""
        self.messages.clear()

    def retry(self) -> None:
        """Ask the last question again. Raises ``ServerError``."""
        if self.messages and self.messages[-1]["role"] == "assistant":
            self.messages.pop()
        if not self.messages:
            console.print("Nothing was asked yet.", style="dim")
            return
        self._answer()

    def ask(self, question: str) -> None:
        """Ask, and show the answer. Raises ``ServerError``."""
        if self.messages and self.messages[-1]["role"] == "user":
            self.messages.pop()  # It was not answered.
        self.messages.append({"role": "user", "content": question})
        self._answer()

    def _answer(self) -> None:
        system = [{"role": "system", "content": self.system}] if self.system else []
        body = {
            "model": self.model,
            "messages": system + self.messages,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_progress": True,
            **self.options,
        }
        answer = _Answer()
        stream = self.client.stream("/v1/chat/completions", body)
        try:
            with contextlib.closing(stream):  # type: ignore[type-var]
                for chunk in stream:
                    answer.take(chunk)
        except KeyboardInterrupt:
            answer.stopped = True
        finally:
            answer.end()
        if answer.text:
            self.messages.append({"role": "assistant", "content": answer.text})


class _Answer:
    """Shows an answer while it comes.

    Attributes:
        text: What the model said, its reasoning excepted.
        stopped: The user did not want more.
    """

    def __init__(self) -> None:
        self.text = ""
        self.stopped = False
        self._begin_s = time.perf_counter()
        self._first_s: float | None = None
        self._last_s = 0.0
        self._usage: dict[str, Any] = {}
        self._metrics: dict[str, Any] = {}
        self._out = Console(highlight=False)
        self._status = console.status("Waiting")
        self._status.start()

    def take(self, chunk: dict[str, Any]) -> None:
        """Show what a chunk brings."""
        self._usage = chunk.get("usage") or self._usage
        self._metrics = chunk.get("mtplx") or self._metrics
        if (progress := chunk.get("prompt_progress")) is not None:
            done, total = progress["processed"], progress["total"]
            self._status.update(
                f"Reading the prompt: {done} of {total} tokens, {progress['cache']} cached"
            )
        for choice in chunk.get("choices", ()):
            delta = choice["delta"]
            self._show(delta.get("reasoning_content"), "dim")
            if content := delta.get("content"):
                self.text += content
                self._show(content, None)

    def _show(self, text: str | None, style: str | None) -> None:
        if not text:
            return
        self._last_s = time.perf_counter()
        if self._first_s is None:
            self._first_s = self._last_s
            self._status.stop()
        # A model may say what a terminal obeys.
        shown = "".join(c for c in text if c.isprintable() or c in "\n\t")
        self._out.out(shown, style=style, end="", highlight=False)
        self._out.file.flush()

    def end(self) -> None:
        """Say what it cost."""
        self._status.stop()
        if self._first_s is not None:
            self._out.out("")
        told = ["stopped"] if self.stopped else []
        metrics = self._metrics
        if "cached_tokens" in metrics:
            told.append(
                f"{metrics['cached_tokens']} cached + {metrics['new_prefill_tokens']} new"
            )
        if self._first_s is not None:
            ttft_s = metrics.get("ttft_s") or self._first_s - self._begin_s
            told.append(f"first token {ttft_s:.2f} s")
            tokens, took_s = self._usage.get("completion_tokens", 0), self._last_s
            if tokens > 1 and took_s > self._first_s:
                told.append(f"{(tokens - 1) / (took_s - self._first_s):.1f} tok/s")
        if told:
            console.print(" · ".join(told), style="dim", highlight=False)
