"""Kill a server that keeps its KV state on disk, at random instants, and look at what it
left.

    python benchmarks/kill_server.py [MODEL] --kills 100

A server with `--kv-disk` answers conversations, and is killed (SIGKILL) at a random time:
while it starts, reads, decodes or writes. After each kill every byte that the index
speaks of must be right, as `mtplx cache verify` says. The next server goes on with the
folder, and its answers must be those of a server that never had one. Exit code 1 if
anything is off. `kill_writer.py` does the same to the disk tier alone, much faster.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

from mtplx.session.disk.audit import verify

CONVERSATIONS = 8
ANSWER_TOKENS = 8
PATIENCE_S = 120
PLACES = ("France", "Italy", "Spain", "Greece", "Egypt", "Japan", "Norway", "Poland")


def question(number: int) -> str:
    """Return a prompt of about 120 tokens; those of one family begin alike."""
    family = "history of cities" if number % 2 else "geography of rivers and lakes"
    rules = f"You answer questions about the {family}, in one short sentence. " * 6
    return f"{rules}What is the capital of {PLACES[number]}?"


class Server:
    """A server process, on a free port."""

    def __init__(self, model: str, *flags: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        start = "from mtplx.cli.main import main; main()"
        self.process = subprocess.Popen(
            [sys.executable, "-c", start, "serve", model, "--port", str(self.port), *flags],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def wait(self) -> None:
        """Return when it answers."""
        end_s = time.monotonic() + PATIENCE_S
        while time.monotonic() < end_s and self.process.poll() is None:
            with contextlib.suppress(OSError):
                self.get("/health")
                return
            time.sleep(0.1)
        raise RuntimeError("The server does not start.")

    def get(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return what a path answers to ``body``."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}",
            None if body is None else json.dumps(body).encode(),
            {"content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            told: dict[str, Any] = json.load(answer)
        return told

    def ask(self, number: int) -> tuple[str, str | None]:
        """Return the answer to a conversation, and where its state came from."""
        body = {
            "messages": [{"role": "user", "content": question(number)}],
            "temperature": 0,
            "max_tokens": ANSWER_TOKENS,
        }
        told = self.get("/v1/chat/completions", body)
        return told["choices"][0]["message"]["content"], told["mtplx"]["cache_source"]

    def kill(self) -> None:
        """End it at once."""
        self.process.kill()
        self.process.wait()


def answer_until_killed(
    server: Server, seed: int, seen: list[tuple[int, str, str | None]]
) -> None:
    pick = random.Random(seed)
    with contextlib.suppress(OSError, ValueError):
        while True:
            number = pick.randrange(CONVERSATIONS)
            seen.append((number, *server.ask(number)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--longest-life-s", type=float, default=4.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    pick = random.Random(options.seed)

    cold = Server(options.model, "--max-kv-size", "0")
    cold.wait()
    expected = [cold.ask(number)[0] for number in range(CONVERSATIONS)]
    cold.kill()

    wrong: list[str] = []
    seen: list[tuple[int, str, str | None]] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "kv"
        for kill in range(options.kills + 1):
            server = Server(options.model, "--kv-disk", str(folder))
            if kill < options.kills and pick.random() < 0.1:  # While it starts.
                time.sleep(pick.uniform(0.5, 5))
                server.kill()
                continue
            server.wait()
            if kill == options.kills:  # The last one may finish.
                seen += [(n, *server.ask(n)) for n in range(CONVERSATIONS)]
                server.kill()
                break
            clients = [
                threading.Thread(
                    target=answer_until_killed, args=(server, pick.randrange(2**30), seen)
                )
                for _ in range(2)
            ]
            for client in clients:
                client.start()
            time.sleep(pick.uniform(0, options.longest_life_s))
            server.kill()
            for client in clients:
                client.join()
            if folder.exists():
                bad = verify(folder).bad
                wrong += [f"kill {kill}: {name}: {reason}" for name, reason in bad]
    wrong += [
        f"{PLACES[number]}: {text!r} from {source}, {expected[number]!r} cold"
        for number, text, source in seen
        if text != expected[number]
    ]
    from_disk = sum(source == "disk" for _, _, source in seen)
    print(
        f"{options.kills} kills, {len(wrong)} faults; {len(seen)} answers were complete, "
        f"{from_disk} of them from state on disk"
    )
    print("\n".join(wrong))
    sys.exit(1 if wrong or not from_disk else 0)


if __name__ == "__main__":
    main()
