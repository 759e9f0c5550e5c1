"""Which values of earlier searches a new one tries first."""

from shoal.plan.search.make import BEST_OF_A_SEARCH, BEST_OF_SEVERAL, first_trials


def trials(name, costs):
    return [({"x": f"{name}{place}"}, cost) for place, cost in enumerate(costs)]


def names(searches):
    return [values["x"] for values in first_trials(searches)]


def test_equal_costs_keep_the_order_of_the_values():
    for cost in (0.0, 1.0, 1e9):
        assert names([trials("a", [cost] * 20)]) == [f"a{i}" for i in range(BEST_OF_A_SEARCH)]


def test_a_cheap_trial_comes_before_a_dear_one_that_is_a_little_better_and_not_before_much_better_ones():
    assert names([trials("a", [100.0, 1.0, 1.0, 1.0])])[:2] == ["a1", "a0"]
    assert names([trials("a", [1.0] * 49 + [0.1])])[0] == "a0"


def test_searches_take_turns_and_the_same_values_come_once():
    alike = [*trials("a", [1.0]), *trials("b", [1.0])]
    assert names([alike, trials("b", [1.0] * 3), trials("c", [1.0] * 2)]) == ["a0", "b0", "c0", "b1", "c1", "b2"]


def test_every_one_of_many_searches_has_its_turn():
    assert len(names([trials(str(i), [1.0] * 9) for i in range(3)])) == BEST_OF_SEVERAL
    assert names([trials(f"{i}-", [1.0] * 9) for i in range(20)]) == [f"{i}-0" for i in range(20)]
