"""The search finds the design that must win."""

import pytest
import toy

from tidegate.base.errors import ConfigError
from tidegate.plan.search import search
from tidegate.plan.summary import summary
from tidegate.slo.goodput import Metric, Slo
from tidegate.slo.parse import parse_slo

GAP = Slo(1.0, 0.03, Metric.GAP)


def planned(setting):
    return summary(setting, search(setting, lambda what, fraction: None, (40, 60, 100)), "0", "toy", 0)


def of_family(plan, family):
    return max((row.goodput_per_gpu for row in plan.rows if row.family == family), default=0.0)


def test_where_prompts_disturb_decodes_badly_and_links_cost_nothing_a_split_wins():
    plan = planned(toy.setting(toy.JEALOUS, slo=GAP))
    assert plan.winner.design == "1P1D"
    assert not plan.winner.runnable and len(plan.winner.commands) == 2


def test_over_a_slow_network_a_split_stays_within_each_node():
    """DistServe's search for low node-affinity."""
    plan = planned(toy.setting(toy.JEALOUS, gpus=4, slo=GAP, per_node=2, network=1e5))
    assert (plan.winner.design, plan.winner.gpus, plan.winner.copies) == ("1P1D", 2, 2)


def test_a_slow_link_forbids_a_split():
    fast, slow = (planned(toy.setting(link=link)) for link in (toy.INFINITE, 1e5))
    assert of_family(fast, "split") > 0
    assert of_family(slow, "split") == 0
    assert slow.winner.runnable


def test_a_link_that_does_not_exist_leaves_engines_only():
    plan = planned(toy.setting(link=0.0))
    assert all(not row.family.startswith("split") for row in plan.rows)


def test_where_nothing_disturbs_copies_of_one_engine_beat_spreading_it():
    plan = planned(toy.setting(of=toy.model(num_heads=4), gpus=4))
    assert (plan.winner.gpus, plan.winner.copies) == (1, 4)


def test_memory_that_is_too_small_for_the_weights_forbids_single_devices():
    big = toy.model(num_heads=4, num_layers=400, hidden_size=4096, ffn_size=16384)
    plan = planned(toy.setting(None, of=big, gpus=4, memory_gib=120.0, slo=Slo(100.0, 10.0), lengths=((50, 5),)))
    assert min(row.gpus for row in plan.rows) == 2


def test_three_devices_of_which_a_split_fills_two_are_best_used_together():
    plan = planned(toy.setting(gpus=3))
    mixed = [row for row in plan.rows if row.family == "split and whole"]
    assert mixed and mixed[0].gpus == 3
    split = of_family(plan, "split")
    engine = max(row.goodput_per_gpu for row in plan.rows if row.runnable)
    assert mixed[0].goodput_per_gpu <= max(split, engine) * 1.02


def test_no_design_passes_the_bound_and_none_is_ranked_before_a_better_one():
    plan = planned(toy.setting(gpus=3))
    rates = [row.goodput_per_gpu for row in plan.rows]
    assert rates == sorted(rates, reverse=True)
    assert rates[0] <= plan.bound_per_gpu * (1 + 1e-9)
    assert all(row.low_per_gpu <= row.goodput_per_gpu <= row.high_per_gpu for row in plan.rows)


def test_the_same_seed_gives_the_same_plan():
    assert planned(toy.setting()) == planned(toy.setting())


def test_an_slo_that_nothing_reaches_is_told_with_limits_that_would_hold():
    sentence = r"nothing on 1 × toy GPU reaches .* attains 0%.* --slo ttft=.*ms,tpot="
    with pytest.raises(ConfigError, match=sentence) as told:
        planned(toy.setting(gpus=1, slo=Slo(0.001, 0.005)))
    limits = str(told.value).split("--slo ")[1].split(" ")[0]
    assert planned(toy.setting(gpus=1, slo=parse_slo(limits))).winner.goodput_per_gpu > 0
