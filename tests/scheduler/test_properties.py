"""Laws 1, 3 and 4, the budgets and the bound on waiting, over random histories."""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from mtplx.errors import InvalidRequestError, QueueFullError
from mtplx.scheduler.config import OVERTAKING_LIMIT
from mtplx.scheduler.request import State
from mtplx.scheduler.step import Outcome, Why
from tests.scheduler.engine_fake import EngineFake


@st.composite
def configs(draw):
    seats, share = draw(st.integers(1, 6)), draw(st.integers(1, 12))
    threshold = draw(st.sampled_from([0, 0, share, 3 * share]))
    return {
        "max_num_seqs": seats,
        "min_prefill_tokens": share,
        "max_num_batched_tokens": seats + share + draw(st.integers(0, 80)),
        "max_num_partial_prefills": draw(st.integers(1, 4)),
        "long_prefill_token_threshold": threshold,
        "prefill_window": draw(st.integers(1, 64)),
        "enable_chunked_prefill": draw(st.sampled_from([True, True, True, False])),
        "spans_share_decodes": draw(st.booleans()),
        "target_itl_s": draw(st.sampled_from([None, None, 0.005, 0.05])),
        "relative_itl_target": draw(st.sampled_from([None, 1.5, 3.0])),
        "max_queue": draw(st.integers(1, 6)),
    }


@st.composite
def prompts(draw, most=150):
    tokens = draw(st.integers(1, most))
    bounds = sorted(draw(st.sets(st.integers(0, tokens), max_size=6)))
    atomic = list(zip(bounds[::2], bounds[1::2], strict=False))
    edges = draw(st.sets(st.integers(0, tokens), max_size=4))
    edges = [e for e in edges if not any(a < e < b for a, b in atomic)]
    cached = draw(st.sampled_from([0, 0, draw(st.integers(0, tokens - 1))]))
    return {"prompt_tokens": tokens, "cached": cached, "edges": edges, "atomic": atomic}


class SchedulerMachine(RuleBasedStateMachine):
    """Any order of arrivals, iterations, failures, cancels and deadlines."""

    @initialize(settings=configs())
    def build(self, settings):
        self.engine = EngineFake(**settings)
        self.scheduler = self.engine.scheduler
        self.config = self.scheduler.config
        self.names = []
        self.now_s = 0.0

    @rule(prompt=prompts(), patience=st.sampled_from([None, None, 3.0]))
    def arrive(self, prompt, patience):
        name = f"r{len(self.names)}"
        deadline_s = None if patience is None else self.now_s + patience
        waiting, running = self.scheduler.waiting, self.scheduler.running
        try:
            self.engine.add(name, **prompt, deadline_s=deadline_s)
        except QueueFullError:
            free = self.config.max_num_seqs - running
            assert waiting == self.config.max_queue + free
        except InvalidRequestError:
            assert not self.config.enable_chunked_prefill
            assert prompt["prompt_tokens"] > self.config.max_whole_prompt_tokens
        else:
            self.names.append(name)

    @rule(data=st.data())
    def iterate(self, data):
        self.now_s += 1.0
        self.engine.start()
        streams = [n for n in self.names if self.scheduler.state(n) is State.DECODING]
        prompts = [n for n in self.names if self.scheduler.state(n) is State.PREFILLING]
        running = streams + prompts
        some = st.sets(st.sampled_from(running), max_size=2) if running else st.just(set())
        step = self.engine.run(
            failed=data.draw(some),
            finished=data.draw(
                st.sets(st.sampled_from(streams), max_size=2) if streams else some
            ),
            undone_spans=data.draw(st.sampled_from([(), (), (), (0,), (1,)])),
            decode_fails=data.draw(st.sampled_from([False, False, False, True])),
        )
        assert set(step.decoding) == set(streams), "law 3: each stream, each iteration"
        self.check_budgets(step, prompts)
        self.check_spans(step)

    def check_budgets(self, step, prompts):
        config = self.config
        prefill = sum(span.tokens for span in step.spans)
        if step.why is Why.WHOLE_PIECE:
            assert len(step.spans) == 1, "what exceeds the budget runs alone"
            return
        assert step.tokens <= config.max_num_batched_tokens
        if config.enable_chunked_prefill:
            assert all(span.tokens <= config.prefill_window for span in step.spans)
        if not prompts:
            assert not step.spans
            return
        tails = {span.request_id for span in step.spans if span.is_tail}
        assert prefill > 0
        if prefill < config.min_prefill_tokens and tails != set(prompts):
            assert any(self.engine.cuts[name][1] for name in prompts), (
                "only an atomic range may cut the guaranteed share short"
            )

    def check_spans(self, step):
        shared = [number for number, span in enumerate(step.spans) if span.shared]
        sharing = self.config.spans_share_decodes and step.decoding and step.spans
        assert shared == ([0] if sharing else [])
        for span in step.spans:
            edges, atomic = self.engine.cuts[span.request_id]
            if self.config.enable_chunked_prefill:
                assert not any(span.start < edge < span.end for edge in edges)
                assert not any(a < span.end < b for a, b in atomic)
            assert span.is_tail == (span.end == self.engine.prompt_tokens[span.request_id])

    @rule(data=st.data())
    def cancel(self, data):
        if self.names:
            name = data.draw(st.sampled_from(self.names))
            ended = self.scheduler.end(name, Outcome.CANCELLED)
            self.engine.ended += [ended] if ended else []

    @rule()
    def expire(self):
        self.engine.ended += self.scheduler.expire(self.now_s)

    @invariant()
    def every_token_once_and_one_end(self):
        if not hasattr(self, "engine"):
            return
        self.scheduler.check()
        ends = Counter(ended.request_id for ended in self.engine.ended)
        for name in self.names:
            alive = self.scheduler.state(name) is not None
            assert ends[name] == (0 if alive else 1)
            cached, computed = self.engine.cached[name], self.engine.computed[name]
            assert computed == list(range(cached, cached + len(computed))), "law 1"
            if self.scheduler.state(name) is State.DECODING:
                assert cached + len(computed) == self.engine.prompt_tokens[name]
        for ended in self.engine.ended:
            name = ended.request_id
            computed = len(self.engine.computed[name])
            if computed:
                assert ended.num_computed_tokens == self.engine.cached[name] + computed

    def teardown(self):
        """Whatever happened, all that is left can be brought to its end."""
        if not hasattr(self, "engine"):
            return
        for _ in range(10_000):
            step = self.engine.run()
            if step.is_empty:
                break
            for name in step.decoding:
                ended = self.scheduler.end(name, Outcome.FINISHED)
                self.engine.ended += [ended] if ended else []
        assert self.scheduler.waiting == self.scheduler.running == 0
        self.every_token_once_and_one_end()


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


@settings(max_examples=60, deadline=None)
@given(
    share=st.integers(2, 16),
    partial=st.integers(1, 3),
    target=st.sampled_from([None, 0.001]),
    threshold=st.sampled_from([0, 16]),
    trace=st.lists(st.tuples(st.integers(0, 6), prompts()), min_size=2, max_size=25),
)
def test_no_prompt_waits_longer_than_the_stated_bound(
    share, partial, target, threshold, trace
):
    engine = EngineFake(
        max_num_seqs=len(trace),
        max_num_batched_tokens=len(trace) + share,
        min_prefill_tokens=share,
        max_num_partial_prefills=partial,
        long_prefill_token_threshold=threshold,
        target_itl_s=target,
        max_queue=len(trace),
    )
    uncached, bound, waited = {}, {}, {}
    atomic_ranges = sum(len(prompt["atomic"]) for _, prompt in trace)

    def iterate():
        engine.run()
        for name in list(waited):
            if engine.scheduler.state(name) is State.DECODING:
                assert waited.pop(name) < bound[name]
            else:
                waited[name] += 1

    for number, (pause, prompt) in enumerate(trace):
        name = f"r{number}"
        own = prompt["prompt_tokens"] - prompt["cached"]
        before = sum(uncached[n] - len(engine.computed[n]) for n in waited)
        engine.add(name, **prompt)
        uncached[name], waited[name] = own, 0
        tokens = before + (OVERTAKING_LIMIT + 1 + partial) * own
        bound[name] = tokens / share + len(trace) + atomic_ranges
        for _ in range(pause):
            iterate()
    for _ in range(10_000):
        if not waited:
            break
        iterate()
    assert not waited
