"""What the README says is true."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mtplx.config import Settings
from mtplx.metrics import PrefillMetrics, StreamMetrics

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
PYTHON = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def example_with(words):
    (code,) = [code for code in PYTHON if words in code]
    return code


def test_the_python_example(demo_folder):
    code = example_with("restore_or_prefill_prompt_state")
    assert (
        "logits = state.model.decode(state.cache, max_new_tokens=1)\n"
        "next_token = logits.argmax()\n"
    ) in code
    names = {}
    exec(code, names)
    tokenizer = names["bank"].model.tokenizer
    assert tokenizer.decode([names["next_token"].item()]) == " Paris"
    longer = [*names["token_ids"], names["next_token"].item(), 1]
    state = names["restore_or_prefill_prompt_state"](
        token_ids=longer, session_bank=names["bank"], stable_prefix_len=0
    )
    assert state.cached_tokens == len(names["token_ids"])


def test_the_settings_table_is_the_settings():
    rows = re.findall(r"^\| `(?:--)?([\w-]+)` \| (.*?) \| (.*) \|$", README, re.MULTILINE)
    told = {name.lower().replace("-", "_"): (default, text) for name, default, text in rows}
    for name, setting in Settings.model_fields.items():
        default = "" if setting.default is None else f"`{setting.default}`"
        assert told[name] == (default, setting.description)


def test_every_metric_is_explained():
    for name in (*PrefillMetrics.__dataclass_fields__, *StreamMetrics.__dataclass_fields__):
        assert f"`{name}`" in README


@pytest.mark.parametrize("link", re.findall(r"\]\((?!http)([^)#]+)\)", README))
def test_links_lead_somewhere(link):
    assert (Path(__file__).parent.parent / link).exists()
