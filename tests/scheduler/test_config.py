import pytest

from mtplx.errors import ConfigError
from mtplx.scheduler.config import SchedulerConfig


def test_budget_must_leave_prefill_its_share_beside_a_full_house():
    SchedulerConfig(max_num_batched_tokens=48, max_num_seqs=32, min_prefill_tokens=16)
    with pytest.raises(ConfigError, match="at least 48"):
        SchedulerConfig(max_num_batched_tokens=47, max_num_seqs=32, min_prefill_tokens=16)


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_num_seqs": 0},
        {"max_queue": 0},
        {"prefill_window": 0},
        {"long_prefill_token_threshold": 3},
        {"target_itl_s": 0.0},
        {"relative_itl_target": 1.0},
    ],
)
def test_refuses_values_that_make_no_sense_by_name(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        SchedulerConfig(**wrong)
