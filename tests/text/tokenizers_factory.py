"""Small real tokenizers and chat templates, made in-process.

The tokenizers are of the three kinds models use: byte-level BPE, BPE with a byte
fallback and SentencePiece's spaces, and one written in Python without offsets.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.tool_parsers import mistral
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

QWEN = """
{%- set ns = namespace(last=-1) -%}
{%- for m in messages -%}
  {%- if m.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- if tools or messages[0].role == 'system' -%}
  {{- '<|im_start|>system\\n' -}}
  {%- if messages[0].role == 'system' -%}{{- messages[0].content -}}{%- endif -%}
  {%- if tools -%}
    {{- '\\n\\n# Tools' -}}
    {%- for tool in tools -%}{{- '\\n' + (tool | tojson) -}}{%- endfor -%}
  {%- endif -%}
  {{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- for m in messages -%}
  {%- if m.role == 'tool' -%}
    {{- '<|im_start|>user\\n<tool_response>\\n' + m.content -}}
    {{- '\\n</tool_response><|im_end|>\\n' -}}
  {%- elif m.role != 'system' or not loop.first -%}
    {{- '<|im_start|>' + m.role + '\\n' -}}
    {%- if m.role == 'assistant' and loop.index0 > ns.last and m.reasoning_content -%}
      {{- '<think>\\n' + m.reasoning_content.strip() + '\\n</think>\\n\\n' -}}
    {%- endif -%}
    {{- (m.content or '').strip() -}}
    {%- for call in m.tool_calls or [] -%}
      {{- '\\n' if m.content or not loop.first else '' -}}
      {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' -}}
      {{- (call.function.arguments | tojson) + '}\\n</tool_call>' -}}
    {%- endfor -%}
    {{- '<|im_end|>\\n' -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""
"""Tools in the system block; reasoning until the next question; content is trimmed."""

LLAMA = """
{{- '<|bos|>' -}}
{%- for m in messages -%}
  {{- '<|im_start|>' + m.role + '\\n\\n' -}}
  {%- if m.tool_calls -%}
    {%- set call = m.tool_calls[0].function -%}
    {{- '{"name": "' + call.name + '", "parameters": ' -}}
    {{- (call.arguments | tojson) + '}' -}}
  {%- else -%}
    {%- if m.role == 'user' and tools and loop.index0 <= 1 -%}
      {%- for tool in tools -%}{{- (tool | tojson) + '\\n\\n' -}}{%- endfor -%}
    {%- endif -%}
    {{- m.content | trim -}}
  {%- endif -%}
  {{- '<|im_end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n\\n' -}}{%- endif -%}
"""
"""Tools in the first question, calls without markers, no newline between messages."""

MISTRAL = """
{{- '<|bos|>' -}}
{%- set ns = namespace(last=-1) -%}
{%- for m in messages -%}
  {%- if m.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- for m in messages -%}
  {%- if m.role == 'user' -%}
    {%- if loop.index0 == ns.last and tools -%}
      {{- '[AVAILABLE_TOOLS] ' + (tools | tojson) + '[/AVAILABLE_TOOLS]' -}}
    {%- endif -%}
    {{- '[INST] ' + m.content + '[/INST]' -}}
  {%- elif m.tool_calls -%}
    {{- '[TOOL_CALLS] [' -}}
    {%- for call in m.tool_calls -%}
      {%- if call.id | length != 9 -%}{{ raise_exception('nine letters') }}{%- endif -%}
      {{- '{"name": "' + call.function.name + '", "arguments": ' -}}
      {{- (call.function.arguments | tojson) + ', "id": "' + call.id + '"}' -}}
      {{- '' if loop.last else ', ' -}}
    {%- endfor -%}
    {{- ']<|im_end|>' -}}
  {%- elif m.role == 'tool' -%}
    {{- '[TOOL_RESULTS] ' + m.content + '[/TOOL_RESULTS]' -}}
  {%- else -%}
    {{- ' ' + m.content.strip() + '<|im_end|>' -}}
  {%- endif -%}
{%- endfor -%}
"""
"""Tools before the last question, the server's ids in calls, no generation header."""


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
    if template == MISTRAL:
        return TokenizerWrapper(
            tokenizer,
            tool_call_start=mistral.tool_call_start,
            tool_call_end=mistral.tool_call_end,
            tool_parser=mistral.parse_tool_call,
        )
    return TokenizerWrapper(tokenizer)


def make_tokenizer(kind: str = "byte_level", *, template: str | None = CHATML) -> Tokenizer:
    return Tokenizer(make_wrapper(kind, template=template))


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def assistant(content: str | None, **extra: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **extra}


def call(name: str, arguments: str, *, call_id: str = "call00001") -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


def result(content: str, *, call_id: str = "call00001") -> dict[str, str]:
    return {"role": "tool", "tool_call_id": call_id, "content": content}


def tool(name: str, **properties: str) -> dict[str, Any]:
    schema = {key: {"type": kind} for key, kind in properties.items()}
    parameters = {"type": "object", "properties": schema}
    function = {"name": name, "description": "A tool.", "parameters": parameters}
    return {"type": "function", "function": function}


def system(content: str) -> dict[str, str]:
    return {"role": "system", "content": content}
