import pytest

from tidegate.slo.lately import Lately


def test_it_is_the_part_of_the_time():
    lately = Lately(memory_s=10.0)
    for second in range(200):
        lately.told(second, True)
        lately.told(second + 0.3, False)
    assert lately.part == pytest.approx(0.3, abs=0.03)


def test_it_does_not_matter_how_often_it_is_told():
    often, seldom = Lately(2.0), Lately(2.0)
    for tenth in range(31):
        often.told(tenth / 10, tenth < 20)
    seldom.told(0.0, True)
    seldom.told(2.0, False)
    seldom.told(3.0, False)
    assert often.part == pytest.approx(seldom.part)


def test_what_was_long_ago_is_forgotten():
    lately = Lately(1.0)
    lately.told(0.0, True)
    lately.told(50.0, False)
    assert lately.part == pytest.approx(1.0)
    lately.told(60.0, False)
    assert lately.part < 1e-3
