"""Computes a forward of several parts, in one of the ways that they can share it.

What goes in are arrays and comes out are arrays: the state of groups is a value here, so
that a forward of groups alone can be traced once for its shapes and replayed. Which way
is exact, and what is run, is decided in ``batch.py``. Runs on the thread that owns MLX.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn

from mtplx.models.cpu import Hooks
from mtplx.models.group import RowGroup
from mtplx.models.layout import Arrays, GroupLayout, Positions
from mtplx.models.packed import (
    PackedLayers,
    Part,
    final_norm,
    mixers,
    one_call_per_part,
    only_rows,
)

BatchMode = Literal["packed", "mixer", "rows"]
"""How the parts of a step share a forward, best first.

* ``packed``: all weights are read once; attention runs once per part.
* ``mixer``: the same, but a layer's whole mixer runs once per part.
* ``rows``: nothing is shared; a forward for each part.
"""


_PROGRAMS = 64  # Traced forwards that are kept, each some hundred kilobytes.


class Runner:
    """Runs a network on parts.

    Args:
        network: Called with rows on the batch axis.

    Attributes:
        mode: How parts share a forward.
        layout: Of groups; None where there are none.
        traces: Forwards of groups alone are traced and replayed.
        has_norm: Logits can be left out for rows that nobody asks for.
    """

    def __init__(self, network: nn.Module) -> None:
        self._network = network
        self._hooks = Hooks(network)
        self._mixers = mixers(network)
        self._norm = final_norm(network)
        self._programs: OrderedDict[Any, Callable[..., Any]] = OrderedDict()
        self.has_norm = self._norm is not None
        self.mode: BatchMode = "rows"
        self.layout: GroupLayout | None = None
        self.traces = False

    def program(
        self, groups: Sequence[RowGroup], lengths: tuple[int, ...]
    ) -> Callable[..., Any]:
        """Return what computes a forward of groups alone."""

        def forward(*arguments: Any) -> Any:
            return self.run(lengths, *arguments)

        if not self.traces:
            return forward
        shapes = tuple((group.rows, group.capacity) for group in groups)
        program = self._programs.pop((lengths, shapes), None)
        if program is None:
            program = mx.compile(forward)
        self._programs[lengths, shapes] = program
        if len(self._programs) > _PROGRAMS:
            self._programs.popitem(last=False)
        return program

    def run(
        self,
        lengths: Sequence[int],
        tokens: mx.array,
        offsets: list[mx.array],
        arrays: list[list[Arrays]],
        parts: Sequence[Part] = (),
        part_offsets: Sequence[int] = (),
        kept: int | None = None,
    ) -> tuple[mx.array, list[list[Arrays]]]:
        """Compute the logits of each row, and what becomes of the groups' state.

        Args:
            lengths: For each group how far attention looks.
            tokens: ``[rows]``.
            offsets: For each group ``[rows]``.
            arrays: For each group its state.
            parts: What is no group, after these.
            part_offsets: The positions of their rows.
            kept: Rows that logits are wanted of, beside the last one; None for all.
        """
        trees = []
        for length, offset, each in zip(lengths, offsets, arrays, strict=True):
            assert self.layout is not None
            trees.append(self.layout.stand_ins(each, Positions(offset, length)))
        parts = [
            *(
                Part(tree, len(offset), is_span=False)
                for tree, offset in zip(trees, offsets, strict=True)
            ),
            *parts,
        ]
        positions = [*offsets, mx.array([*part_offsets], mx.int32)]
        logits = self._logits(parts, tokens, positions, kept)
        after = [self.layout.after(tree) for tree in trees] if self.layout else []
        return logits, after

    def _logits(
        self,
        parts: Sequence[Part],
        tokens: mx.array,
        positions: Sequence[mx.array],
        kept: int | None,
    ) -> mx.array:
        network = self._network
        if len(parts) == 1 or self.mode == "rows":
            outputs, start = [], 0
            with one_call_per_part(self._hooks):
                for part in parts:
                    rows = tokens[start : start + part.rows]
                    inputs = rows[None] if part.is_span else rows[:, None]
                    outputs.append(network(inputs, cache=part.layers)[:, -1])
                    start += part.rows
            return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs)
        packed = PackedLayers(parts, mx.concatenate([*positions]))
        split = self._mixers if self.mode == "mixer" else ()
        with one_call_per_part(self._hooks, split), self._spare_output_layer(kept):
            logits = network(tokens[:, None], cache=packed.layers)[:, -1]
        packed.give_back()
        return logits

    def _spare_output_layer(self, kept: int | None) -> AbstractContextManager[None]:
        """Keep the rows that decode and the last of the span for the output layer."""
        if kept is None:
            return nullcontext()
        assert self._norm is not None
        return only_rows(self._norm, [slice(kept), slice(-1, None)])
