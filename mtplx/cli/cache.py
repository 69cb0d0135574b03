"""``mtplx cache``: the KV state that a server keeps on disk, for its owner.

``ls``, ``stats`` and ``verify`` only look, also beside a running server; ``gc`` and
``clear`` need the folder for themselves and say who has it.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from mtplx.cli.options import ConfigFile, LogLevel, configure, flag
from mtplx.errors import ConfigError

if TYPE_CHECKING:
    from mtplx.config import Settings

app = typer.Typer(
    help="The KV state that a server keeps on disk (`--kv-disk`).", no_args_is_help=True
)

KvDisk = Annotated[str | None, flag("kv_disk")]
KvDiskBytes = Annotated[int | None, flag("kv_disk_bytes")]

FIRST_TOKENS = 6
FINGERPRINT_LETTERS = 12


@app.command("ls")
def list_segments(
    kv_disk: KvDisk = None, log_level: LogLevel = None, config: ConfigFile = None
) -> None:
    """List what is stored, the most recently used last."""
    from mtplx.session.disk.audit import look

    contents = look(
        _folder(configure(config, kv_disk=kv_disk, log_level=log_level).settings)
    )
    table = Table()
    for heading in ("tokens", "bytes", "snapshots", "uses"):
        table.add_column(heading, justify="right")
    for heading in ("last used", "model", "first tokens"):
        table.add_column(heading)
    for stored in contents.segments:
        row = stored.row
        more = " ..." if len(row.tokens) > FIRST_TOKENS else ""
        table.add_row(
            f"{row.start}-{row.end}",
            f"{stored.nbytes:,}",
            str(stored.snapshots),
            str(row.uses),
            time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row.last_used_s)),
            stored.fingerprint[:FINGERPRINT_LETTERS],
            " ".join(map(str, row.tokens[:FIRST_TOKENS])) + more,
        )
    Console().print(table)


@app.command("stats")
def show_stats(
    kv_disk: KvDisk = None,
    kv_disk_bytes: KvDiskBytes = None,
    log_level: LogLevel = None,
    config: ConfigFile = None,
) -> None:
    """Say how much is stored, and how much was written."""
    from mtplx.session.disk.audit import look

    settings = configure(
        config, kv_disk=kv_disk, kv_disk_bytes=kv_disk_bytes, log_level=log_level
    ).settings
    contents = look(_folder(settings))
    tokens = sum(len(stored.row.tokens) for stored in contents.segments)
    snapshots = sum(stored.snapshots for stored in contents.segments)
    models = {stored.fingerprint for stored in contents.segments}
    typer.echo(
        f"segments         {len(contents.segments)} with {tokens:,} tokens\n"
        f"snapshots        {snapshots}\n"
        f"models           {len(models)}\n"
        f"bytes            {contents.nbytes:,} of {settings.kv_disk_bytes:,}\n"
        f"written in 24 h  {contents.bytes_written_today:,} "
        f"of {settings.kv_disk_daily_bytes:,}\n"
        f"quarantined      {contents.quarantined}"
    )


@app.command("verify")
def verify_files(
    kv_disk: KvDisk = None, log_level: LogLevel = None, config: ConfigFile = None
) -> None:
    """Read every file and check its bytes; exit code 1 when something is bad."""
    from mtplx.session.disk.audit import verify

    settings = configure(config, kv_disk=kv_disk, log_level=log_level).settings
    verdict = verify(_folder(settings))
    for name, reason in verdict.bad:
        typer.echo(f"bad: {name}: {reason}")
    orphans = f"; {verdict.orphans} files without an entry" if verdict.orphans else ""
    typer.echo(
        f"{verdict.files} files with {verdict.nbytes:,} bytes checked, "
        f"{len(verdict.bad)} bad{orphans}."
    )
    if verdict.bad:
        raise typer.Exit(1)


@app.command("gc")
def collect_garbage(
    kv_disk: KvDisk = None,
    kv_disk_bytes: KvDiskBytes = None,
    log_level: LogLevel = None,
    config: ConfigFile = None,
) -> None:
    """Remove what no entry speaks of, and what is beyond `--kv-disk-bytes`."""
    from mtplx.session.disk import DiskTier

    settings = configure(
        config, kv_disk=kv_disk, kv_disk_bytes=kv_disk_bytes, log_level=log_level
    ).settings
    tier = DiskTier(
        _existing(settings),
        max_bytes=settings.kv_disk_bytes,
        daily_write_bytes=settings.kv_disk_daily_bytes,
    )
    stats = tier.stats()
    tier.close()
    typer.echo(
        f"Removed {stats.orphans} files without an entry and {stats.evicted} segments, set "
        f"aside {stats.quarantined}. {stats.segments} segments in {stats.bytes:,} bytes "
        "are left."
    )


@app.command("clear")
def clear_folder(
    kv_disk: KvDisk = None, log_level: LogLevel = None, config: ConfigFile = None
) -> None:
    """Remove all KV state; files that are not MTPLX's stay."""
    from mtplx.session.disk.folder import Folder

    settings = configure(config, kv_disk=kv_disk, log_level=log_level).settings
    folder = Folder(_existing(settings))
    folder.claim()
    try:
        before = folder.nbytes()
        folder.clear()
        typer.echo(f"Removed {before - folder.nbytes():,} bytes.")
    finally:
        folder.release()


def _folder(settings: Settings) -> Path:
    if settings.kv_disk is None:
        raise ConfigError(
            "No folder is named. Give `--kv-disk DIR`, or set `kv_disk` in the "
            "configuration."
        )
    return Path(settings.kv_disk).expanduser()


def _existing(settings: Settings) -> Path:
    """Return a folder that was used; making one to clean it would hide a wrong name."""
    folder = _folder(settings)
    if not (folder / "segments").is_dir():
        raise ConfigError(
            f"There is no KV state in {folder}. Name the folder that "
            "`mtplx serve --kv-disk` was given."
        )
    return folder
