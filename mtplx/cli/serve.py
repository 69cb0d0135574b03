"""``mtplx serve``: build engine, bank and application, and run until a signal."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from mtplx.cli.banner import show_banner
from mtplx.cli.loading import load_with_progress, other_models
from mtplx.cli.options import (
    Adapter,
    ConfigFile,
    Device,
    Dtype,
    LogLevel,
    Model,
    PrefillWindow,
    TailGrid,
    configure,
    console,
    flag,
)
from mtplx.cli.prompts import read_pinned
from mtplx.config import Configuration

if TYPE_CHECKING:
    from mtplx.engine import Engine
    from mtplx.server.run import HttpServer

logger = logging.getLogger(__name__)


def serve(
    model: Model = None,
    also: Annotated[str | None, flag("also")] = None,
    cached_models: Annotated[bool | None, flag("cached_models")] = None,
    aliases: Annotated[str | None, flag("aliases")] = None,
    max_models: Annotated[int | None, flag("max_models")] = None,
    idle_unload_s: Annotated[float | None, flag("idle_unload_s")] = None,
    host: Annotated[str | None, flag("host")] = None,
    port: Annotated[int | None, flag("port")] = None,
    adapter: Adapter = None,
    device: Device = None,
    dtype: Dtype = None,
    prefill_window: PrefillWindow = None,
    tail_grid: TailGrid = None,
    enable_chunked_prefill: Annotated[bool | None, flag("enable_chunked_prefill")] = None,
    max_num_batched_tokens: Annotated[int | None, flag("max_num_batched_tokens")] = None,
    max_num_seqs: Annotated[int | None, flag("max_num_seqs")] = None,
    max_num_partial_prefills: Annotated[
        int | None, flag("max_num_partial_prefills")
    ] = None,
    long_prefill_token_threshold: Annotated[
        int | None, flag("long_prefill_token_threshold")
    ] = None,
    target_itl_ms: Annotated[float | None, flag("target_itl_ms")] = None,
    overlap_decode: Annotated[bool | None, flag("overlap_decode")] = None,
    max_kv_size: Annotated[int | None, flag("max_kv_size")] = None,
    kv_bytes: Annotated[int | None, flag("kv_bytes")] = None,
    kv_disk: Annotated[str | None, flag("kv_disk")] = None,
    kv_disk_bytes: Annotated[int | None, flag("kv_disk_bytes")] = None,
    kv_disk_daily_bytes: Annotated[int | None, flag("kv_disk_daily_bytes")] = None,
    pin_prompt: Annotated[str | None, flag("pin_prompt")] = None,
    cache_isolation: Annotated[str | None, flag("cache_isolation")] = None,
    max_tokens: Annotated[int | None, flag("max_tokens")] = None,
    max_queue: Annotated[int | None, flag("max_queue")] = None,
    max_body_bytes: Annotated[int | None, flag("max_body_bytes")] = None,
    api_key: Annotated[str | None, flag("api_key")] = None,
    api_key_file: Annotated[str | None, flag("api_key_file")] = None,
    auth: Annotated[bool | None, flag("auth")] = None,
    cors_origins: Annotated[str | None, flag("cors_origins")] = None,
    sse_keepalive: Annotated[str | None, flag("sse_keepalive")] = None,
    normalize_billing_header: Annotated[
        bool | None, flag("normalize_billing_header")
    ] = None,
    log_prompts: Annotated[bool | None, flag("log_prompts")] = None,
    log_level: LogLevel = None,
    config: ConfigFile = None,
) -> None:
    """Serve models over the APIs of OpenAI and Anthropic."""
    configuration = configure(
        config,
        model=model,
        also=also,
        cached_models=cached_models,
        aliases=aliases,
        max_models=max_models,
        idle_unload_s=idle_unload_s,
        host=host,
        port=port,
        adapter=adapter,
        device=device,
        dtype=dtype,
        prefill_window=prefill_window,
        tail_grid=tail_grid,
        enable_chunked_prefill=enable_chunked_prefill,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=max_num_seqs,
        max_num_partial_prefills=max_num_partial_prefills,
        long_prefill_token_threshold=long_prefill_token_threshold,
        target_itl_ms=target_itl_ms,
        overlap_decode=overlap_decode,
        max_kv_size=max_kv_size,
        kv_bytes=kv_bytes,
        kv_disk=kv_disk,
        kv_disk_bytes=kv_disk_bytes,
        kv_disk_daily_bytes=kv_disk_daily_bytes,
        pin_prompt=pin_prompt,
        cache_isolation=cache_isolation,
        max_tokens=max_tokens,
        max_queue=max_queue,
        max_body_bytes=max_body_bytes,
        api_key=api_key,
        api_key_file=api_key_file,
        auth=auth,
        cors_origins=cors_origins,
        sse_keepalive=sse_keepalive,
        normalize_billing_header=normalize_billing_header,
        log_prompts=log_prompts,
        log_level=log_level,
    )
    with running(configuration) as server:
        server.http.run()


@dataclass(frozen=True)
class Running:
    """A server that is ready to be run.

    Attributes:
        http: Its ``run`` serves until a signal, or ``stop``.
    """

    engine: Engine
    http: HttpServer


@contextmanager
def running(configuration: Configuration, *, banner: bool = True) -> Iterator[Running]:
    """Load the first model and yield a server of it, whose engine stops at the end.

    Args:
        configuration: Of the server.
        banner: Say on the terminal what is served, once connections are accepted.

    Raises:
        MtplxError: It cannot be served so.
    """
    settings = configuration.settings

    from mtplx.engine import Engine
    from mtplx.server.app import build_app
    from mtplx.server.auth import check_binding, read_keys
    from mtplx.server.origins import read_origins
    from mtplx.server.run import HttpServer, reserve
    from mtplx.session import SessionBank
    from mtplx.session.disk import DiskTier

    # Mistakes are told before a model is loaded.
    read_origins(settings)
    keys = read_keys(settings)
    port_socket = reserve(settings.host, settings.port)
    check_binding(port_socket.getsockname()[0], keys, settings)
    others = {
        name: partial(load_with_progress, its_settings)
        for name, its_settings in other_models(settings).items()
    }
    tier = None
    if settings.kv_disk is not None:
        tier = DiskTier(
            Path(settings.kv_disk).expanduser(),
            max_bytes=settings.kv_disk_bytes,
            daily_write_bytes=settings.kv_disk_daily_bytes,
        )
    bank = SessionBank(settings.max_kv_size, max_bytes=settings.kv_bytes)
    engine = Engine(partial(load_with_progress, settings), bank, settings, tier, others)
    engine.start()
    if settings.pin_prompt is not None:
        prompt = read_pinned(Path(settings.pin_prompt), engine.tokenizer)
        with console.status(f"Reading the {len(prompt.token_ids)} tokens to be pinned"):
            tokens = engine.pin(prompt)
        logger.info("%d tokens of %s are pinned", tokens, settings.pin_prompt)

    def started(url: str) -> None:
        if banner:
            show_banner(url, engine.info, engine.memory, tuple(others), bool(len(keys)))

    try:
        app = build_app(
            engine=engine,
            tokenizer=engine.tokenizer,
            info=engine.info,
            configuration=configuration,
        )
        yield Running(engine, HttpServer(app, port_socket, on_started=started))
    finally:
        engine.stop()
