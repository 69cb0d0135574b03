"""A body of ``/v1/messages`` as a ``TurnRequest``.

Decides how Anthropic's blocks read as a chat: consecutive messages of one role become
one, as the API says; results of tools become messages of their own; blocks of text are
parted by an empty line, except in the model's own messages, where they are pieces of one
text. What templates have no word for, a failed call, is said in the text. State is kept
at the ends of messages, so a mark inside of one counts for its end. Pure; any thread.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from mtplx.errors import InvalidRequestError
from mtplx.server.chat_body import template_kwargs
from mtplx.server.messages.body import (
    AnthropicTool,
    AnthropicToolChoice,
    Block,
    CountTokensBody,
    MessagesBody,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from mtplx.server.messages.thinking import thinking_text
from mtplx.server.turn import ToolChoice, TurnRequest
from mtplx.text.grammar import json_schema_grammar
from mtplx.types import SamplingParams


def prompt_request(body: CountTokensBody, *, namespace: str = "") -> TurnRequest:
    """Return the turn that has ``body``'s prompt. Slow for a large schema.

    Raises:
        InvalidRequestError: The messages do not fit together, or the schema of the answer
            cannot be used.
    """
    chat = _Chat()
    chat.add("system", body.system, "system")
    for index, message in enumerate(body.messages):
        chat.add(message.role, message.content, f"messages[{index}].content")
    continued = chat.continued()
    if body.cache_control is not None:
        chat.mark()
    choice = body.tool_choice
    return TurnRequest(
        messages=chat.messages,
        tools=[_function(tool) for tool in body.tools],
        tool_choice=_tool_choice(choice),
        parallel_tool_calls=choice is None or not choice.disable_parallel_tool_use,
        grammar=_grammar(body),
        template_kwargs=template_kwargs(_effort(body)),
        continue_final_message=continued,
        edge_after=tuple(sorted(chat.edges)),
        namespace=namespace,
    )


def answer_request(body: MessagesBody, *, namespace: str = "") -> TurnRequest:
    """Return the turn that ``body`` asks for. Raises as ``prompt_request`` does."""
    return replace(
        prompt_request(body, namespace=namespace),
        sampling=SamplingParams(
            temperature=body.temperature, top_p=body.top_p, top_k=body.top_k
        ),
        stop=tuple(body.stop_sequences),
        max_new_tokens=body.max_tokens,
    )


class _Chat:
    """The messages so far, the edges asked for, and the names of the calls made."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.edges: set[int] = set()
        self._call_names: dict[str, str] = {}

    def mark(self) -> None:
        """Ask for an edge after the last message."""
        self.edges.add(len(self.messages) - 1)

    def add(self, role: str, blocks: Sequence[Block], path: str) -> None:
        """Add the blocks of one message; ``path`` is theirs in the body."""
        for index, block in enumerate(blocks):
            match block:
                case TextBlock():
                    self._text(role, block.text)
                case ThinkingBlock():
                    message = self._last(role)
                    thought = message.get("reasoning_content", "") + thinking_text(block)
                    message["reasoning_content"] = thought
                case ToolUseBlock():
                    self._call(block)
                case ToolResultBlock():
                    self._result(block, f"{path}[{index}]")
                case _:
                    continue  # Thinking that nobody here can read.
            if _is_marked(block):
                self.mark()

    def continued(self) -> bool:
        """Whether the last message is the beginning of the answer. An empty one of the
        model's begins nothing, and is dropped."""
        if not self.messages:
            raise InvalidRequestError("The messages are empty.", param="messages")
        last = self.messages[-1]
        if last["role"] != "assistant":
            return False
        if "tool_calls" in last:
            raise InvalidRequestError(
                "The last message calls a tool; send its `tool_result` in a user message.",
                param="messages",
            )
        if not last["content"]:
            self.messages.pop()
            self.edges.discard(len(self.messages))
            return False
        return True

    def _last(self, role: str) -> dict[str, Any]:
        """Return the last message if it has this role, else a new one."""
        if not self.messages or self.messages[-1]["role"] != role:
            self.messages.append({"role": role, "content": ""})
        return self.messages[-1]

    def _text(self, role: str, text: str) -> None:
        message = self._last(role)
        parts = [message["content"], text]
        message["content"] = ("" if role == "assistant" else "\n\n").join(
            filter(None, parts)
        )

    def _call(self, block: ToolUseBlock) -> None:
        self._call_names[block.id] = block.name
        arguments = json.dumps(block.input, ensure_ascii=False)
        call = {
            "id": block.id,
            "type": "function",
            "function": {"name": block.name, "arguments": arguments},
        }
        self._last("assistant").setdefault("tool_calls", []).append(call)

    def _result(self, block: ToolResultBlock, path: str) -> None:
        name = self._call_names.get(block.tool_use_id)
        if name is None:
            raise InvalidRequestError(
                f"`{path}.tool_use_id` names no `tool_use` block of an earlier message.",
                param=f"{path}.tool_use_id",
            )
        text = "\n\n".join(part.text for part in block.content)
        self.messages.append(
            {
                "role": "tool",
                "tool_call_id": block.tool_use_id,
                "name": name,
                "content": f"Error: {text}" if block.is_error else text,
            }
        )


def _is_marked(block: Block) -> bool:
    if isinstance(block, ToolResultBlock) and any(map(_is_marked, block.content)):
        return True
    return getattr(block, "cache_control", None) is not None


def _function(tool: AnthropicTool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name}
    if tool.description is not None:
        function["description"] = tool.description
    function["parameters"] = tool.input_schema
    if tool.strict:
        function["strict"] = True
    return {"type": "function", "function": function}


def _tool_choice(choice: AnthropicToolChoice | None) -> ToolChoice:
    match choice and choice.type:
        case "none":
            return ToolChoice("none")
        case "any":
            return ToolChoice("required")
        case "tool":
            assert choice is not None
            return ToolChoice("required", choice.name)
    return ToolChoice()


def _grammar(body: CountTokensBody) -> str | None:
    asked = body.output_config.format or body.output_format
    if asked is None:
        return None
    where = "output_config.format" if body.output_config.format else "output_format"
    return json_schema_grammar(asked.json_schema, param=f"{where}.schema")


def _effort(body: CountTokensBody) -> str | None:
    """Return the word for it of OpenAI's API."""
    if body.thinking is None:
        return body.output_config.effort
    if body.thinking.type == "disabled":
        return "none"
    return body.output_config.effort or "medium"
