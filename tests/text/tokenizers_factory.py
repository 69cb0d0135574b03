"""Small real tokenizers and chat templates, made in-process.

The tokenizers are of the three kinds models use: byte-level BPE, BPE with a byte
fallback and SentencePiece's spaces, and one written in Python without offsets.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizer, PreTrainedTokenizerFast

from mtplx.text.tokenizer import Tokenizer

SENTENCES = (
    "system user assistant\nYou are a careful assistant. Answer in one sentence.\n",
    "What is the capital of France? The capital of France is Paris.\n\n",
    "Grüße aus Köln 🙂 日本語のテスト\n",
    "def read(path):\n    return path.read_text()\n",
)
SPECIAL = ("<|bos|>", "<|im_start|>", "<|im_end|>")

CHATML = """
{%- for m in messages -%}
  {{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""

THINKING = """
{%- set ns = namespace(last=-1) -%}
{%- for m in messages -%}
  {%- if m.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- if ns.last < 0 -%}{{ raise_exception('No user message.') }}{%- endif -%}
{%- for m in messages -%}
  {{- '<|im_start|>' + m.role + '\\n' -}}
  {%- if m.role == 'assistant' and loop.index0 > ns.last -%}
    {{- '<think>\\n' + (m.reasoning_content or '') + '\\n</think>\\n\\n' -}}
  {%- endif -%}
  {{- m.content.lstrip('\\n') + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- '<|im_start|>assistant\\n' -}}
  {%- if not enable_thinking -%}{{- '<think>\\n\\n</think>\\n\\n' -}}{%- endif -%}
{%- endif -%}
"""
"""Reasoning only after the last user message; an empty one in the header if disabled."""

ALTERNATING = """
{{- '<|bos|>' -}}
{%- if messages[0].role == 'system' -%}
  {%- set system = messages[0].content + '\\n\\n' -%}{%- set rest = messages[1:] -%}
{%- else -%}
  {%- set system = '' -%}{%- set rest = messages -%}
{%- endif -%}
{%- for m in rest -%}
  {%- if (m.role == 'user') != (loop.index0 % 2 == 0) -%}
    {{- raise_exception('Conversation roles must alternate user/assistant') -}}
  {%- endif -%}
  {%- if m.role == 'user' -%}
    {{- '[INST] ' + (system if loop.first else '') + m.content + ' [/INST]' -}}
  {%- else -%}
    {{- ' ' + m.content + '<|im_end|>' -}}
  {%- endif -%}
{%- endfor -%}
"""
"""No system role of its own, no generation header, nothing but alternation."""


@cache
def byte_level_json() -> str:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(SENTENCES, trainer)
    backend.add_tokens(["<think>", "</think>"])
    backend.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A", special_tokens=[("<|bos|>", backend.token_to_id("<|bos|>"))]
    )
    return backend.to_str()


@cache
def byte_fallback_json() -> str:
    chars = sorted(set("".join(SENTENCES[:2]).replace(" ", "▁").replace("\n", "")))
    words = ["▁", *chars, "th", "▁th", "▁the", "is", "▁is"]
    tokens = ["<unk>", *SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    vocab = {token: index for index, token in enumerate(dict.fromkeys(tokens))}
    merges = [("t", "h"), ("▁", "th"), ("▁th", "e"), ("i", "s"), ("▁", "is")]
    backend = Backend(
        models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens(["<unk>", *SPECIAL])
    return backend.to_str()


class CharTokenizer(PreTrainedTokenizer):
    """One token for each character below 1024, in Python: no backend, no offsets."""

    @property
    def vocab_size(self) -> int:
        return 1024

    def get_vocab(self) -> dict[str, int]:
        return {chr(index): index for index in range(1024)} | self.added_tokens_encoder

    def _tokenize(self, text: str, **kwargs: Any) -> list[str]:
        return list(text)

    def _convert_token_to_id(self, token: str) -> int:
        return ord(token)

    def _convert_id_to_token(self, index: int) -> str:
        return chr(index)

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        return "".join(tokens)


def make_wrapper(kind: str = "byte_level", *, template: str | None = CHATML) -> Any:
    """A mlx-lm wrapper around a tokenizer of this kind."""
    special = {"eos_token": "<|im_end|>", "bos_token": "<|bos|>"}
    if kind == "char":
        tokenizer: Any = CharTokenizer(
            **special, additional_special_tokens=["<|im_start|>"]
        )
    else:
        source = {"byte_level": byte_level_json, "byte_fallback": byte_fallback_json}[kind]
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=Backend.from_str(source()), **special
        )
    tokenizer.chat_template = template
    return TokenizerWrapper(tokenizer)


def make_tokenizer(kind: str = "byte_level", *, template: str | None = CHATML) -> Tokenizer:
    return Tokenizer(make_wrapper(kind, template=template))


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def assistant(content: str, **extra: str) -> dict[str, str]:
    return {"role": "assistant", "content": content, **extra}


def system(content: str) -> dict[str, str]:
    return {"role": "system", "content": content}
