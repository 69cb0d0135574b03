"""Kill clients at random moments under load, and see that the server keeps nothing.

    python benchmarks/kill_clients.py http://127.0.0.1:8000 --kills 200 --pid PID

Clients are processes that stream answers to prompts of random lengths; each is killed
(SIGKILL) after a random time, in whatever state its request is: waiting, being read or
decoding. Others run to their end meanwhile. Afterwards nothing may run, wait or be
pinned, the answers that were not killed must be whole, and, with the server's process
id, its memory less the SessionBank's may not have grown. Exit code 1 if anything is off.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

CLIENT = """
import json, sys, urllib.request
body = json.dumps({"messages": [{"role": "user", "content": sys.argv[2]}],
                   "max_tokens": int(sys.argv[3]), "temperature": 0, "stream": True})
request = urllib.request.Request(sys.argv[1] + "/v1/chat/completions", body.encode(),
                                 {"Content-Type": "application/json"})
with urllib.request.urlopen(request, timeout=600) as response:
    last = [line for line in response if line.strip()][-1]
sys.exit(0 if last.strip() == b"data: [DONE]" else 3)
"""
WORDS = ("river", "stone", "light", "door", "song", "paper", "cloud", "road", "glass")
SETTLE_S = 120


def engine(url: str) -> dict:
    with urllib.request.urlopen(f"{url}/health", timeout=60) as response:
        return json.load(response)["engine"]


def resident_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    found = re.search(r"VmRSS:\s+(\d+) kB", status)
    assert found is not None
    return int(found[1]) * 1024


def client(url: str, pick: random.Random) -> subprocess.Popen[bytes]:
    text = " ".join(pick.choice(WORDS) for _ in range(pick.choice((5, 40, 200, 600))))
    tokens = str(pick.choice((1, 8, 40)))
    return subprocess.Popen([sys.executable, "-c", CLIENT, url, text, tokens])


def settle(url: str) -> dict:
    """Wait until nothing runs or waits, and return the engine's status."""
    deadline = time.monotonic() + SETTLE_S
    while True:
        status = engine(url)
        if not status["running"] and not status["waiting"]:
            return status
        if time.monotonic() > deadline:
            return status
        time.sleep(0.2)


def round_of(url: str, kills: int, pick: random.Random, at_once: int) -> int:
    """Kill that many clients; return how many of the others did not get a whole answer."""
    running: list[tuple[subprocess.Popen[bytes], float | None]] = []
    killed = broken = 0
    while killed < kills or running:
        while killed + len(running) < kills + 2 and len(running) < at_once:
            dies = pick.random() < 0.85
            at = time.monotonic() + pick.expovariate(1 / 2.0) if dies else None
            running.append((client(url, pick), at))
        for entry in list(running):
            process, at = entry
            if at is not None and time.monotonic() >= at and process.poll() is None:
                process.kill()
                killed += 1
            if process.poll() is not None:
                running.remove(entry)
                broken += process.returncode not in (0, -9)
        time.sleep(0.02)
    return broken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("url")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--at-once", type=int, default=6)
    parser.add_argument("--pid", type=int, help="the server's, to watch its memory")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    pick = random.Random(options.seed)
    broken = round_of(options.url, options.kills // 4, pick, options.at_once)
    before = settle(options.url)
    base = options.pid and resident_bytes(options.pid) - before["bank_bytes"]
    broken += round_of(
        options.url, options.kills - options.kills // 4, pick, options.at_once
    )
    after = settle(options.url)
    print(f"{options.kills} clients killed, {broken} answers of others broken")
    print({name: after[name] for name in ("running", "waiting", "pinned", "bank_tokens")})
    leaks = broken + after["running"] + after["waiting"] + after["pinned"]
    if options.pid:
        grown = resident_bytes(options.pid) - after["bank_bytes"] - base
        print(f"memory beyond the bank grew by {grown / 2**20:.0f} MiB")
        leaks += grown > 100 * 2**20
    sys.exit(1 if leaks else 0)


if __name__ == "__main__":
    main()
