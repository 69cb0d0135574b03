"""A server as a user starts it: the real command, the real demo model."""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from openai import OpenAI

START_TIMEOUT_S = 300
COMMAND = [sys.executable, "-c", "from mtplx.cli.main import main; main()"]


@dataclass
class Served:
    """A running ``mtplx serve``."""

    process: subprocess.Popen[str]
    url: str = ""
    log: list[str] = field(default_factory=list)

    @property
    def client(self) -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=120)

    @property
    def model(self) -> str:
        return str(self.client.models.list().data[0].id)

    def health(self) -> dict:
        return httpx.get(f"{self.url}/health", timeout=30).json()

    def engine_when(self, condition, timeout_s=60) -> dict:
        """Return the engine's status once it meets ``condition``; fail if it never does."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            engine = self.health()["engine"]
            if condition(engine):
                return engine
            time.sleep(0.02)
        raise AssertionError(f"The engine never got there: {engine}")

    def resident_bytes(self) -> int:
        """Memory of the process, as the system counts it."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(r"VmRSS:\s+(\d+) kB", status)[1]) * 1024

    def interrupt(self) -> int:
        """Press Ctrl-C; return the exit code."""
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(60)


@contextlib.contextmanager
def served(*arguments: str) -> Iterator[Served]:
    """Run ``mtplx serve`` with these arguments on a free port until the block ends."""
    process = subprocess.Popen(
        [*COMMAND, "serve", *arguments, "--port", "0"],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        env=None,
    )
    server = Served(process)
    started = threading.Event()

    def read() -> None:
        assert process.stderr is not None
        for line in process.stderr:
            server.log.append(line)
            # The terminal may fold the line, never the address.
            if found := re.search(r"(http://[\d.]+:\d+)/v1", line):
                server.url = found[1]
                started.set()
        started.set()

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        started.wait(START_TIMEOUT_S)
        assert server.url, "".join(server.log)
        yield server
    finally:
        process.kill()
        process.wait()
        reader.join()
