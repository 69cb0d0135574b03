"""The one tokenizer of the loaded model, safe to use from several threads.

Owns the choice between a fast tokenizer's backend and a slow tokenizer, the lock the
latter needs, and the answers whose tokens are kept. Rendering is ``render``, text from
tokens ``stream``, single tokens ``vocabulary``. Server workers render while the engine
thread decodes.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import cached_property
from threading import Lock
from typing import Any

from llguidance import LLTokenizer

from mtplx.errors import InvalidRequestError
from mtplx.text.answers import AnswerStore, answer_as_sent
from mtplx.text.canonical import canonical_tools
from mtplx.text.channels import AnswerFormat, ChannelParser, read_answer_format
from mtplx.text.encoding import EncodedText, Encoding
from mtplx.text.grammar import grammar_vocabulary
from mtplx.text.render import check_can_continue, render_chat
from mtplx.text.stream import TextStream
from mtplx.text.tools import (
    Message,
    knows_tools,
    speaks_of_tools,
    with_parsed_arguments,
    with_tools_as_text,
)
from mtplx.text.vocabulary import Vocabulary
from mtplx.types import Prompt

logger = logging.getLogger(__name__)

# Where no edge is known, more than this can be what a user wrote.
_SHORT_HEADER_CHARS = 16
_PROBE = "Hello, wörld!\n 12 x"


class Tokenizer:
    """Text to prompts, and tokens to text.

    Args:
        wrapper: A ``TokenizerWrapper`` of mlx-lm around a tokenizer of transformers.
            Untyped because importing mlx-lm loads MLX. It is not to be used elsewhere.
    """

    def __init__(self, wrapper: Any) -> None:
        self._wrapper = wrapper
        self._lock = Lock()
        self._grammar_vocabularies: dict[int, LLTokenizer] = {}
        self._backend = _usable_backend(wrapper)
        self._vocabulary = Vocabulary(wrapper, self._lock)
        self.eos_token_ids: frozenset[int] = frozenset(wrapper.eos_token_ids)
        self.vocab_size: int = len(wrapper)
        self.has_chat_template: bool = bool(wrapper.has_chat_template)
        self._told_that_tools_are_text = False
        form = self.answer_format
        self._answers = AnswerStore(
            ends={each: self.token_text(each) for each in self.eos_token_ids},
            markers=[
                *self._vocabulary.special.values(),
                *(form.think or ()),
                *(form.calls.start, form.calls.end),
            ],
        )

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return token ids; ``add_special_tokens`` adds what the model wants around a
        plain text (a begin token, say)."""
        return self._encode(text, add_special_tokens).token_ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text; broken characters are U+FFFD."""
        token_ids = list(token_ids)
        if self._backend is not None:
            return self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens)
        with self._lock:
            return self._wrapper.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def token_text(self, token_id: int) -> str:
        """Return what a token says, special ones written out; bytes that are no character
        are U+FFFD."""
        return self.token_bytes(token_id).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes a token stands for inside a text; none for an id that is no
        token (models pad their output)."""
        return self._vocabulary.token_bytes(token_id)

    def render_chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        continue_final_message: bool = False,
        edge_after: Sequence[int] = (),
        **template_kwargs: Any,
    ) -> Prompt:
        """Render a conversation with the model's chat template.

        An answer that was ``remember``ed keeps its tokens. Tools are put into one order
        of keys here. A template that knows no tools gets them, calls and results as text
        (``tools.with_tools_as_text``).

        Args:
            messages: ``role`` (system, user, assistant, tool) and ``content`` (a string),
                and what else the template reads; arguments of ``tool_calls`` as JSON
                text or objects.
            tools: As OpenAI's chat API has them.
            continue_final_message: The last message is the beginning of the answer.
            edge_after: Indices of messages whose ends are edges.
            template_kwargs: Variables of the template, ``enable_thinking`` say.

        Raises:
            InvalidRequestError: There is no chat template, it refuses the messages,
                arguments are no JSON object, the last message cannot be continued, or
                the prompt is empty.
        """
        if not self.has_chat_template:
            raise InvalidRequestError(
                "This model has no chat template. Send plain text to /v1/completions, or "
                "serve a model with a chat template.",
                param="messages",
            )
        if continue_final_message:
            check_can_continue(messages)
        messages = with_parsed_arguments(messages)
        tools = canonical_tools(tools)
        if (tools or speaks_of_tools(messages)) and not self._template_knows_tools:
            self._tell_that_tools_are_text()
            messages, index_of = with_tools_as_text(messages, tools)
            edge_after = [index_of[index] for index in edge_after]
            tools = []
        if tools:
            template_kwargs["tools"] = tools

        def template(messages: Sequence[Message], generation_header: bool) -> str:
            return self._wrapper.apply_chat_template(
                # Copies, because a template in Python may write into its messages.
                [dict(message) for message in messages],
                tokenize=False,
                add_generation_prompt=generation_header,
                **template_kwargs,
            )

        return render_chat(
            messages,
            template,
            self._encode_shown,
            find_kept=self._answers.find_in_chat,
            tool_names=[str(tool.get("function", {}).get("name")) for tool in tools],
            continue_final_message=continue_final_message,
            edge_after=edge_after,
        )

    def render_text(self, text: str) -> Prompt:
        """Render plain text, to be continued as it stands.

        A text that begins with an earlier one and its answer keeps that answer's tokens.

        Raises:
            InvalidRequestError: The prompt is empty.
        """
        before = self._before_text
        shown = "" if before is None else before + text
        if kept := self._answers.find_in_text(shown):
            token_ids = EncodedText(shown, self._encode_shown, kept).token_ids
        else:
            token_ids = self.encode(text, add_special_tokens=True)
        if not token_ids:
            raise InvalidRequestError(
                "The prompt has no tokens. Send a prompt that is not empty.", param="prompt"
            )
        # The usual next request is this text and more of it.
        return Prompt(
            token_ids=tuple(token_ids), stable_prefix_len=len(token_ids), text=shown
        )

    def remember(self, prompt: Prompt, token_ids: Sequence[int], message: Message) -> None:
        """Keep the tokens of an answer, for when ``message`` comes back as history.

        Args:
            prompt: As it was rendered here; any other is ignored.
            token_ids: All that were generated, the end token included.
            message: The answer as it was sent: what was generated after the end of its
                ``content`` (in a token in which a stop string began) is not kept.
        """
        if not prompt.text:
            return
        token_ids = list(token_ids)
        if token_ids and token_ids[-1] in self.eos_token_ids:
            token_ids.pop()
        text, ends = self._replay(prompt, token_ids)
        answer = answer_as_sent(token_ids, text, ends, message)
        if answer is not None:
            self._answers.add(prompt, answer)

    def text_stream(
        self, prompt_token_ids: Sequence[int], stop: Sequence[str] = ()
    ) -> TextStream:
        """Return a stream for the answer to this prompt, which ends at ``stop``. Of
        special tokens it shows those that ``channels`` looks for."""
        return TextStream(self._decode_answer, prompt_token_ids, stop)

    def channels(
        self, prompt: Prompt, *, tools: Sequence[Mapping[str, Any]] = ()
    ) -> ChannelParser:
        """Return what tells the channels of the answer to ``prompt`` apart.

        Args:
            prompt: As it was rendered here.
            tools: What the answer may call.
        """
        return ChannelParser(
            self.answer_format, tools=tools, reasoning=self.opens_reasoning(prompt)
        )

    def opens_reasoning(self, prompt: Prompt) -> bool:
        """Whether the answer to ``prompt`` begins inside reasoning."""
        # The last edge stands before the generation header.
        header = prompt.edge_chars[-1] if prompt.edge_chars else -_SHORT_HEADER_CHARS
        return self.answer_format.opens_reasoning(prompt.text[header:])

    def grammar_vocabulary(self, rows: int) -> LLTokenizer | None:
        """Return the tokens that grammars choose from, made once.

        The first call takes a second or more, in which no other thread runs Python: it
        belongs before the first stream.

        Args:
            rows: Of the model's output layer.

        Returns:
            None for a tokenizer written in Python, or with more tokens than ``rows``.
        """
        if self._backend is None or rows < self.vocab_size:
            return None
        with self._lock:
            if rows not in self._grammar_vocabularies:
                self._grammar_vocabularies[rows] = grammar_vocabulary(
                    self._backend.to_str(), rows, sorted(self.eos_token_ids)
                )
            return self._grammar_vocabularies[rows]

    @cached_property
    def answer_format(self) -> AnswerFormat:
        """How answers are laid out."""
        return read_answer_format(self._wrapper, knows_tools=self._template_knows_tools)

    def _replay(self, prompt: Prompt, token_ids: Sequence[int]) -> tuple[str, list[int]]:
        """Return the text of an answer as it was streamed, but special tokens written
        out, and how much of it is certain after each token."""
        stream = self.text_stream(prompt.token_ids)
        text, ends = "", []
        for token_id in token_ids:
            special = self._vocabulary.special.get(token_id)
            if special is None:
                text += stream.push(token_id)
            else:
                text += stream.finish() + special
                stream = self.text_stream(())
            ends.append(len(text))
        return text + stream.finish(), ends

    def _decode_answer(self, token_ids: Sequence[int]) -> str:
        if self._hidden_ids is None:
            return self.decode(token_ids)
        shown = [token_id for token_id in token_ids if token_id not in self._hidden_ids]
        return self.decode(shown, skip_special_tokens=False)

    @cached_property
    def _hidden_ids(self) -> frozenset[int] | None:
        """Special tokens that answers do not show; None means all."""
        special = self._vocabulary.special.keys()
        shown = special & self.answer_format.tokens.values()
        return frozenset(special - shown) if shown else None

    @cached_property
    def _template_knows_tools(self) -> bool:
        return self.has_chat_template and knows_tools(self._wrapper.apply_chat_template)

    def _tell_that_tools_are_text(self) -> None:
        if not self._told_that_tools_are_text:
            self._told_that_tools_are_text = True
            logger.warning(
                "This model's chat template does not know tools: they are described in "
                "the system message instead. Calls may be less reliable."
            )

    @cached_property
    def _before_text(self) -> str | None:
        """What special tokens stand before a plain text, written out; None where some
        stand after it too."""
        shown = self.encode("x", add_special_tokens=False)
        token_ids = self.encode("x", add_special_tokens=True)
        count = len(token_ids) - len(shown)
        if token_ids[count:] != shown:
            return None
        return "".join(self.token_text(token_id) for token_id in token_ids[:count])

    def _encode_shown(self, text: str) -> Encoding:
        # A template itself writes the begin token and all others.
        return self._encode(text, False)

    def _encode(self, text: str, add_special_tokens: bool) -> Encoding:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequestError(
                "The text contains half of a surrogate pair, which is no character. "
                "Send valid Unicode."
            ) from error
        if self._backend is not None:
            encoded = self._backend.encode(text, add_special_tokens=add_special_tokens)
            return Encoding(encoded.ids, encoded.offsets)
        with self._lock:
            token_ids = self._wrapper.encode(text, add_special_tokens=add_special_tokens)
        return Encoding(list(token_ids), None)


def _usable_backend(wrapper: Any) -> Any:
    """Return the Rust tokenizer inside a fast one, or None where it won't do.

    transformers sets truncation and padding on it in every call, which raises "Already
    borrowed" when another thread is encoding; the backend alone never changes. It also
    tells offsets. Some fast tokenizers rewrite the text before it gets there: these count
    as slow.
    """
    backend = getattr(wrapper, "backend_tokenizer", None)
    if backend is None:
        return None
    backend.no_truncation()
    backend.no_padding()
    same = all(
        backend.encode(_PROBE, add_special_tokens=special).ids
        == list(wrapper.encode(_PROBE, add_special_tokens=special))
        for special in (False, True)
    )
    return backend if same else None
