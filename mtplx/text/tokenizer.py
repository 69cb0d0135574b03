"""The one tokenizer of the loaded model, safe to use from several threads.

Owns the choice between a fast tokenizer's backend and a slow tokenizer, and the lock the
latter needs. Rendering is ``render``, text from tokens ``stream``. Server workers render
while the engine thread decodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock
from typing import Any

from mtplx.errors import InvalidRequestError
from mtplx.text.render import Encoding, Message, render_chat
from mtplx.text.stream import TextStream
from mtplx.types import Prompt

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
        self._backend = _usable_backend(wrapper)
        self.eos_token_ids: frozenset[int] = frozenset(wrapper.eos_token_ids)
        self.vocab_size: int = len(wrapper)
        self.has_chat_template: bool = bool(wrapper.has_chat_template)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return token ids; ``add_special_tokens`` adds what the model wants around a
        plain text (a begin token, say)."""
        return self._encode(text, add_special_tokens).token_ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text without special tokens; broken characters are U+FFFD."""
        if self._backend is not None:
            return self._backend.decode(list(token_ids), skip_special_tokens=True)
        with self._lock:
            return self._wrapper.decode(list(token_ids), skip_special_tokens=True)

    def render_chat(self, messages: Sequence[Message], **template_kwargs: Any) -> Prompt:
        """Render a conversation with the model's chat template.

        Args:
            messages: ``role`` and ``content`` (a string), and what else the template
                reads.
            template_kwargs: Variables of the template, ``enable_thinking`` say.

        Raises:
            InvalidRequestError: There is no chat template, it refuses the messages, or
                the prompt is empty.
        """
        if not self.has_chat_template:
            raise InvalidRequestError(
                "This model has no chat template. Send plain text to /v1/completions, or "
                "serve a model with a chat template.",
                param="messages",
            )

        def template(messages: Sequence[Message], generation_header: bool) -> str:
            return self._wrapper.apply_chat_template(
                # Copies, because a template in Python may write into its messages.
                [dict(message) for message in messages],
                tokenize=False,
                add_generation_prompt=generation_header,
                **template_kwargs,
            )

        # The template itself writes the begin token and all others.
        return render_chat(messages, template, lambda text: self._encode(text, False))

    def render_text(self, text: str) -> Prompt:
        """Render plain text, to be continued as it stands.

        Raises:
            InvalidRequestError: The prompt is empty.
        """
        token_ids = tuple(self.encode(text, add_special_tokens=True))
        if not token_ids:
            raise InvalidRequestError(
                "The prompt has no tokens. Send a prompt that is not empty.", param="prompt"
            )
        # The usual next request is this text and more of it.
        return Prompt(token_ids=token_ids, stable_prefix_len=len(token_ids))

    def text_stream(
        self, prompt_token_ids: Sequence[int], stop: Sequence[str] = ()
    ) -> TextStream:
        """Return a stream for the answer to this prompt, which ends at ``stop``."""
        return TextStream(self.decode, prompt_token_ids, stop)

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
