"""What is not read again: TTFT and cached tokens, turn by turn.

Works against any server that speaks OpenAI's chat API; several take turns, scenario by
scenario, and are shown side by side:

    python benchmarks/reuse.py mtplx=http://127.0.0.1:8000/v1 \\
        mlx-lm=http://127.0.0.1:8080/v1:default_model \\
        --serve mtplx="mtplx serve demo --port 8000 --kv-disk /tmp/kv"

A server is NAME=URL, or NAME=URL:MODEL where the first model it lists is not meant. One
with a ``--serve`` command is started here and stopped at the end; the scenario
``restart`` needs that. Both servers get the same texts, which differ from run to run and
from repeat to repeat, so that nothing is known beforehand. ``cached`` is what the server
reports, ``?`` where it reports nothing.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import httpx
from openai import APITimeoutError, OpenAI, OpenAIError
from rich.console import Console
from rich.table import Table
from stall import WAIT_S, text

Message = dict[str, Any]

SERVER = re.compile(r"(?P<name>[^=]+)=(?P<url>\S+?/v1)(?::(?P<model>\S+))?")

TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Look a word up.",
        "parameters": {
            "type": "object",
            "properties": {"word": {"type": "string"}},
            "required": ["word"],
        },
    },
}


@dataclass
class Server:
    """A server, ours to start and stop if it has a command."""

    name: str
    url: str
    model: str | None
    command: str | None = None
    process: subprocess.Popen[bytes] | None = None

    @cached_property
    def client(self) -> OpenAI:
        return OpenAI(base_url=self.url, api_key="none", timeout=WAIT_S, max_retries=0)

    def start(self) -> None:
        """Start it, if it is ours, and wait until it lists its models."""
        if self.command is not None:
            self.process = subprocess.Popen(
                shlex.split(self.command),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        end_s = time.monotonic() + WAIT_S
        while True:
            try:
                listed = self.client.models.list().data
                break
            except OpenAIError:
                gone = self.process is not None and self.process.poll() is not None
                assert not gone, f"{self.name} ended at once: {self.command}"
                assert time.monotonic() < end_s, f"{self.name} does not answer"
                time.sleep(0.1)
        self.model = self.model or listed[0].id

    def stop(self) -> None:
        """Stop it, if it is ours, as a service manager would."""
        if self.process is not None:
            self.process.terminate()
            self.process.wait(WAIT_S)
            self.process = None


@dataclass
class Turn:
    """One request. ``cached_tokens`` is None where the server does not tell."""

    scenario: str
    name: str
    ttft_s: float
    prompt_tokens: int
    cached_tokens: int | None


class Conversation:
    """Sends the whole conversation with each turn, as clients do.

    Args:
        server: Where to.
        scenario: What its turns are called.
        new_tokens: Most tokens of an answer.
        tools: What may be called.
    """

    def __init__(
        self, server: Server, scenario: str, new_tokens: int, tools: tuple[Any, ...] = ()
    ) -> None:
        self.messages: list[Message] = []
        self._server = server
        self._scenario = scenario
        self._new_tokens = new_tokens
        self._tools = {"tools": [*tools]} if tools else {}

    def ask(self, name: str, *messages: Message, timeout_s: float = WAIT_S) -> Turn:
        """Send more messages, and add the answer to the conversation."""
        self.messages += messages
        text, calls, usage = "", {}, None
        first_s = None
        sent_s = time.perf_counter()
        for chunk in self._server.client.chat.completions.create(
            model=self._server.model or "",
            messages=self.messages,  # type: ignore[arg-type]
            max_tokens=self._new_tokens,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
            timeout=timeout_s,
            **self._tools,
        ):
            usage = chunk.usage or usage
            for choice in chunk.choices:
                delta = choice.delta
                if delta.content or delta.tool_calls or choice.finish_reason:
                    first_s = first_s or time.perf_counter()
                text += delta.content or ""
                for part in delta.tool_calls or ():
                    call = calls.setdefault(part.index, _no_call())
                    call["id"] = part.id or call["id"]
                    if part.function is not None:
                        call["function"]["name"] += part.function.name or ""
                        call["function"]["arguments"] += part.function.arguments or ""
        assert first_s is not None, "the server sent no answer"
        assert usage is not None, "the server did not send the usage"
        answer: Message = {"role": "assistant", "content": text}
        if calls:
            answer |= {"content": text or None, "tool_calls": [*calls.values()]}
        self.messages.append(answer)
        details = usage.prompt_tokens_details
        return Turn(
            self._scenario,
            name,
            first_s - sent_s,
            usage.prompt_tokens,
            None if details is None else details.cached_tokens,
        )

    def results(self, content: str) -> list[Message]:
        """Return the results of the calls just made; without calls, a question."""
        calls = self.messages[-1].get("tool_calls") or ()
        results = [
            {"role": "tool", "tool_call_id": call["id"], "content": content}
            for call in calls
        ]
        return results or [_user(f"It says: {content}")]


def _no_call() -> Message:
    return {"id": "", "type": "function", "function": {"name": "", "arguments": ""}}


def _user(content: str) -> Message:
    return {"role": "user", "content": content}


def _system(words: int, seed: str) -> Message:
    content = f"You are a careful assistant. Know this: {text(words, seed)}."
    return {"role": "system", "content": content}


# -- scenarios ------------------------------------------------------------------

Options = argparse.Namespace
Scenario = Callable[[Server, Options, str], Iterator[Turn]]


def chat(server: Server, options: Options, seed: str) -> Iterator[Turn]:
    """Turns that only append."""
    talk = Conversation(server, "chat", options.new_tokens)
    news = [_system(options.words, seed)]
    for number in range(options.turns):
        news.append(_user(f"{text(options.turn_words, f'{seed}/{number}')}?"))
        yield talk.ask(str(number + 1), *news)
        news = []


def tool_loop(server: Server, options: Options, seed: str) -> Iterator[Turn]:
    """An agent that calls a tool again and again; a model that does not gets what the
    tool would have said as the next question."""
    talk = Conversation(server, "tool loop", options.new_tokens, (TOOL,))
    news = [_system(options.words, seed), _user("Look up every word you do not know.")]
    for number in range(options.rounds):
        yield talk.ask(str(number + 1), *news)
        news = talk.results(text(options.turn_words, f"{seed}/{number}"))


def fan_out(server: Server, options: Options, seed: str) -> Iterator[Turn]:
    """One system prompt, many questions."""
    system = _system(options.words, seed)
    for number in range(options.clients):
        talk = Conversation(server, "fan-out", options.new_tokens)
        question = _user(f"{text(8, f'{seed}/{number}')}?")
        yield talk.ask(str(number + 1), system, question)


def retry(server: Server, options: Options, seed: str) -> Iterator[Turn]:
    """The client gives up on the way, and sends the same again."""
    prompts = [
        [_system(options.words, f"{seed}/{which}"), _user("Sum it up.")]
        for which in ("cold", "again")
    ]
    cold = Conversation(server, "retry", options.new_tokens).ask("cold", *prompts[0])
    yield cold
    try:
        given_up = Conversation(server, "retry", options.new_tokens)
        given_up.ask("given up", *prompts[1], timeout_s=cold.ttft_s / 3)
    except (APITimeoutError, httpx.TimeoutException):
        yield Conversation(server, "retry", options.new_tokens).ask("again", *prompts[1])
    else:
        print(f"{server.name} answered within {cold.ttft_s / 3:.2f} s: no retry")


def restart(server: Server, options: Options, seed: str) -> Iterator[Turn]:
    """The server is stopped between two turns of a conversation."""
    if server.command is None:
        return
    talk = Conversation(server, "restart", options.new_tokens)
    news = [_system(options.words, seed), _user(f"{text(8, seed)}?")]
    yield talk.ask("cold", *news)
    yield talk.ask("next turn", _user("And then?"))
    server.stop()
    server.start()
    yield talk.ask("after restart", _user("And after that?"))


SCENARIOS: dict[str, Scenario] = {
    "chat": chat,
    "tools": tool_loop,
    "fan-out": fan_out,
    "retry": retry,
    "restart": restart,
}


# -- all of it ------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("servers", nargs="+", metavar="NAME=URL[:MODEL]")
    parser.add_argument("--serve", action="append", default=[], metavar="NAME=COMMAND")
    parser.add_argument("--scenario", action="append", choices=[*SCENARIOS])
    parser.add_argument("--turns", type=int, default=20, help="of the chat")
    parser.add_argument("--rounds", type=int, default=10, help="of the tool loop")
    parser.add_argument("--clients", type=int, default=5, help="of the fan-out")
    parser.add_argument("--words", type=int, default=400, help="of a system prompt")
    parser.add_argument("--turn-words", type=int, default=40, help="of a question")
    parser.add_argument("--new-tokens", type=int, default=24)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    servers = read_servers(options.servers, options.serve)
    turns: dict[str, list[Turn]] = {server.name: [] for server in servers}
    try:
        for server in servers:
            server.start()
        for repeat in range(options.repeats):
            seed = f"{time.time()}/{repeat}"
            for name in options.scenario or SCENARIOS:
                for server in servers:
                    for turn in SCENARIOS[name](server, options, f"{seed}/{name}"):
                        turns[server.name].append(turn)
                        print(f"{server.name} {repeat}: {turn}", flush=True)
    finally:
        for server in servers:
            server.stop()
    show(turns)
    if options.json:
        rows = {name: [asdict(turn) for turn in own] for name, own in turns.items()}
        options.json.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


def read_servers(specs: list[str], commands: list[str]) -> list[Server]:
    """Read what the command line says of servers."""
    by_name = dict(command.split("=", 1) for command in commands)
    servers = []
    for spec in specs:
        found = SERVER.fullmatch(spec)
        assert found, f"{spec}: write NAME=URL or NAME=URL:MODEL; a URL ends with /v1"
        servers.append(
            Server(**found.groupdict(), command=by_name.pop(found["name"], None))
        )
    assert not by_name, f"no server is called {', '.join(by_name)}"
    return servers


def show(turns: dict[str, list[Turn]]) -> None:
    """Print medians over the repeats, and each server's later turns against the first
    server's."""
    table = Table("scenario", "turn")
    for name in turns:
        table.add_column(f"{name}\nTTFT s", justify="right")
        table.add_column("cached /\nprompt", justify="right")
    keys = dict.fromkeys((t.scenario, t.name) for own in turns.values() for t in own)
    later: dict[str, dict[str, list[float]]] = {}
    scenario = None
    for key in keys:
        if scenario not in (None, key[0]):
            table.add_section()
        cells = []
        for name, own in turns.items():
            mine = [turn for turn in own if (turn.scenario, turn.name) == key]
            cells += _cells(mine)
            if scenario == key[0]:
                ttfts = later.setdefault(scenario, {}).setdefault(name, [])
                ttfts += [turn.ttft_s for turn in mine]
        scenario = key[0]
        table.add_row(*key, *cells)
    console = Console()
    console.print(table)
    for scenario, by_server in later.items():
        medians = {name: statistics.median(own) for name, own in by_server.items() if own}
        first = next(iter(medians.values()))
        parts = [f"{name} {s:.3f} s ({s / first:.1f}x)" for name, s in medians.items()]
        console.print(f"{scenario}, median TTFT after the first turn: {', '.join(parts)}")


def _cells(turns: list[Turn]) -> list[str]:
    if not turns:
        return ["", ""]
    ttft_s = statistics.median(turn.ttft_s for turn in turns)
    last = turns[-1]
    cached = "?" if last.cached_tokens is None else str(last.cached_tokens)
    return [f"{ttft_s:.3f}", f"{cached} / {last.prompt_tokens}"]


if __name__ == "__main__":
    main()
