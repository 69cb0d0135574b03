"""Sizes that no test machine serves; they pass in seconds or not at all."""

from mtplx.scheduler.step import StepResult
from tests.scheduler.engine_fake import EngineFake


def test_thousands_of_waiting_requests():
    engine = EngineFake(relative_itl_target=None, max_queue=5000, max_num_seqs=256)
    for i in range(5000):
        engine.scheduler.add(f"r{i}", prompt_tokens=1 + i * 7919 % 500, deadline_s=float(i))
    started = []
    while (name := engine.scheduler.next_to_start()) is not None:
        engine.scheduler.start(name)
        step = engine.scheduler.schedule()
        started.append(name)
        engine.scheduler.apply(step, _all_done(step))
    assert len(started) == 256
    assert len(engine.scheduler.expire(1e9)) == 5000
    engine.scheduler.check()


def test_a_million_tokens_with_thousands_of_edges():
    engine = EngineFake(max_num_batched_tokens=512, prefill_window=256)
    engine.add("stream", 8)
    engine.run()
    engine.scheduler.add("long", prompt_tokens=1_000_000)
    assert engine.scheduler.next_to_start() == "long"
    engine.scheduler.start("long", 0, range(0, 1_000_000, 300), [(299_400, 299_700)])
    computed = 0
    while engine.scheduler.state("long") != "decoding":
        step = engine.scheduler.schedule()
        engine.scheduler.apply(step, _all_done(step, decode_s=0.01))
        for span in step.spans:
            assert span.start == computed
            computed = span.end
    assert computed == 1_000_000


def _all_done(step, decode_s=0.01):
    return StepResult(
        decode_s=decode_s if step.decoding else None,
        span_s=tuple(1e-5 * span.tokens for span in step.spans),
    )
