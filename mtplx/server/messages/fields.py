"""The tables of Anthropic's request fields: what is ignored, and what is refused.

They work as those of ``mtplx/server/fields.py`` do. What is honoured is declared in
``body.py``. Pure; any thread.
"""

from __future__ import annotations

from mtplx.server.fields import FieldTable

_NOTHING_BILLED = "nothing is billed here"

PROMPT = FieldTable(
    ignored={
        "anthropic_beta": "clients made for other clouds put the header's value here",
        "anthropic_version": "as `anthropic_beta`",
        "betas": "as `anthropic_beta`",
        "billing_policy": _NOTHING_BILLED,
        "fallback_credit_token": _NOTHING_BILLED,
        "fallbacks": "other models to try after a refusal; this server never refuses one",
        "inference_geo": "the answer is computed on this machine",
        "metadata": "names the end user for the provider's own statistics",
        "service_tier": "there is one tier",
        "speed": "there is one speed",
    },
    refused={
        "compaction": (),
        "container": (),
        "context_management": (
            {},
            {"edits": []},
            {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        ),
        "mcp_servers": ([],),
        "thread": (),
    },
)

_ANSWER_ONLY = "shapes the answer, and only the prompt is counted"

COUNT = FieldTable(
    ignored={
        **PROMPT.ignored,
        "diagnostics": _ANSWER_ONLY,
        "max_tokens": _ANSWER_ONLY,
        "stop_sequences": _ANSWER_ONLY,
        "stream": _ANSWER_ONLY,
        "temperature": _ANSWER_ONLY,
        "top_k": _ANSWER_ONLY,
        "top_p": _ANSWER_ONLY,
    },
    refused=PROMPT.refused,
)

TEXT = FieldTable(ignored={"citations": "clients echo an answer's; they are not its text"})

_CALLER = "tells that the model itself made the call; there is no other caller"

TOOL_USE = FieldTable(ignored={"caller": _CALLER}, refused={"toolset_name": ()})

TOOL_RESULT = FieldTable(refused={"toolset_name": ()})

TOOL = FieldTable(
    ignored={
        "cache_control": "the end of the tools is an edge anyway",
        "eager_input_streaming": "arguments are streamed as they are written anyway",
    },
    refused={
        "allowed_callers": (["direct"],),
        "defer_loading": (False,),
        "input_examples": ([],),
    },
)

THINKING = FieldTable(
    ignored={
        "budget_tokens": "the model ends its thinking itself; `max_tokens` bounds the whole"
    }
)

OUTPUT_CONFIG = FieldTable(refused={"task_budget": ()})
