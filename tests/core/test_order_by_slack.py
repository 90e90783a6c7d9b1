"""Order "slack": as many prompts in time as can be, the hopeless ones last and never starved."""

from itertools import permutations

from hypothesis import given
from hypothesis import strategies as st

from tidegate.policy.order import BySlack


class Prompt:
    def __init__(self, tokens, deadline_s, arrived_s=0.0, priority=0, begun=False):
        self.arrived_s, self.deadline_s, self.late = arrived_s, deadline_s, False
        self.launched, self.remaining = 0, tokens
        self.priority, self.begun = priority, begun


class ASecondAToken:
    batch_s = 0.0

    def work_s(self, start, tokens):
        return float(tokens)

    def after_s(self, work_s):
        return work_s


def waiting(order, prompts):
    return sorted(prompts, key=order.key)


def in_time(prompts, now):
    met = 0
    for prompt in prompts:
        now += prompt.remaining
        met += now <= prompt.deadline_s
    return met


prompts = st.lists(st.tuples(st.integers(1, 9), st.integers(0, 25), st.integers(0, 5)), min_size=1, max_size=6)


class ForTheseAlone(BySlack):
    ROOM = 0.0


@given(prompts, st.integers(0, 10))
def test_without_room_for_others_no_order_at_all_has_more_prompts_in_time(specs, now):
    order, all_prompts = ForTheseAlone(), [Prompt(tokens, now + left, arrived) for tokens, left, arrived in specs]
    ranked = order.rank(waiting(order, all_prompts), now, ASecondAToken())
    assert sorted(map(id, ranked)) == sorted(map(id, all_prompts)), "each is served once"
    assert in_time(ranked, now) == max(in_time(other, now) for other in permutations(all_prompts))


def test_room_for_others_is_left_at_the_cost_of_the_longest_of_several():
    def ranked(*all_prompts):
        order = BySlack()
        return order.rank(waiting(order, all_prompts), 0.0, ASecondAToken())

    long, short, alone = Prompt(80, 90.0), Prompt(10, 90.0 * (1 + BySlack.ROOM) - 0.5), Prompt(80, 80.0)
    assert ranked(long, short) == [short, long]
    short.deadline_s += 1.0
    assert ranked(long, short) == [long, short]
    assert ranked(alone) == [alone] and not alone.late
    many = [Prompt(10, 200.0 * (1 + BySlack.MOST_ROOM), arrived_s=i) for i in range(20)]
    assert ranked(*many) == many, "never more than the most"


def test_who_would_be_told_by_a_batch_that_ends_too_late_is_put_off_but_is_not_late():
    class InBatches(ASecondAToken):
        batch_s = 20.0

    def ranked(*all_prompts):
        order = ForTheseAlone()
        return order.rank(waiting(order, all_prompts), 0.0, InBatches())

    long, short, alone = Prompt(30, 49.0), Prompt(10, 49.5), Prompt(30, 35.0)
    assert ranked(long, short) == [short, long], "done after 40 seconds, told after 50 on average"
    short.deadline_s = 50.0
    assert ranked(long, short) == [long, short]
    assert ranked(alone) == [alone] and not alone.late
    assert ranked(Prompt(30, 29.0))[0].late


@given(prompts)
def test_those_that_cannot_make_it_any_more_are_marked_and_come_last_by_arrival(specs):
    order, all_prompts = BySlack(), [Prompt(*spec) for spec in specs]
    ranked = order.rank(waiting(order, all_prompts), 0.0, ASecondAToken())
    assert [p.late for p in ranked] == sorted(p.remaining > p.deadline_s for p in all_prompts)
    ranked = order.rank(waiting(order, all_prompts), 0.0, ASecondAToken())  # the queue is sorted again by key
    arrivals = [p.arrived_s for p in ranked if p.late]
    assert arrivals == sorted(arrivals)


def test_a_prompt_put_off_for_others_stays_before_the_hopeless():
    order = BySlack()
    long, short, hopeless = Prompt(10, 11), Prompt(4, 12), Prompt(5, 2)
    assert order.rank(waiting(order, [long, short, hopeless]), 0.0, ASecondAToken()) == [short, long, hopeless]


@given(st.integers(1, 400), st.integers(1, 64), st.lists(st.integers(1, 64), min_size=1, max_size=20))
def test_a_late_prompt_waits_for_a_bounded_amount_of_other_work(tokens, budget, lengths):
    """Under prompts in time that never end, it gets its share of the tokens all the same: others get no more than that
    leaves, and what is in a few batches."""
    most = tokens / BySlack.LATE_SHARE
    order, late = BySlack(), Prompt(tokens, -1.0)
    others = 0
    for turn in range(int(most) + tokens + 64):
        fresh = Prompt(lengths[turn % len(lengths)], 1e9)
        for prompt in order.arrange(waiting(order, [fresh, late]), 0.0, ASecondAToken()):
            count = min(budget, prompt.remaining)
            prompt.remaining -= count
            order.served(prompt, count)
            others += count if prompt is fresh else 0
            break  # a batch of one prompt
        if not late.remaining:
            break
    assert not late.remaining
    assert others <= most + 2 * 64


def test_late_prompts_do_not_save_up_turns_while_there_are_none():
    order, fresh, late = BySlack(), Prompt(100_000, 1e9), Prompt(10, -1.0)
    order.arrange([fresh], 0.0, ASecondAToken())
    order.served(fresh, 50_000)
    order.arrange([fresh], 0.0, ASecondAToken())
    assert order.arrange(waiting(order, [fresh, late]), 0.0, ASecondAToken()) == [fresh, late]


def test_asking_for_the_rank_takes_nobodys_turn():
    order, fresh, late = BySlack(), Prompt(100, 1e9), Prompt(10, -1.0)
    order.arrange(waiting(order, [fresh, late]), 0.0, ASecondAToken())
    order.served(fresh, 32)
    assert order.rank(waiting(order, [fresh, late]), 0.0, ASecondAToken()) == [fresh, late]
    assert order.arrange(waiting(order, [fresh, late]), 0.0, ASecondAToken()) == [late, fresh]


def test_somebody_who_is_reading_comes_first_however_late():
    order = BySlack()
    reading, urgent = Prompt(50, 5.0, begun=True), Prompt(10, 100.0, arrived_s=20.0)
    queue = waiting(order, [urgent, reading])
    assert order.arrange(queue, 20.0, ASecondAToken()) == [reading, urgent]
    assert not reading.late


def test_late_prompts_of_one_class_do_not_use_up_what_is_due_to_another():
    order = BySlack()
    late = Prompt(10, 1.0, priority=1)
    others = [Prompt(1, 1000.0, priority=1) for _ in range(3)]
    order.arrange(waiting(order, [late, *others]), 5.0, ASecondAToken())
    order.served(others[0], 1000)
    order.arrange([Prompt(1, 1000.0, priority=0)], 5.0, ASecondAToken())  # nobody in this class is late
    assert order.arrange(waiting(order, [late, *others]), 5.0, ASecondAToken())[0] is late
