import pytest

from paceline.rl.tasks.split import choose, split_of

KEYS = [f"row-{place}" for place in range(1000)]


def test_about_one_row_in_five_is_held_out_for_ever():
    held_out = [key for key in KEYS if split_of(key) == "eval"]
    assert 150 < len(held_out) < 250
    assert held_out[:4] == ["row-3", "row-4", "row-6", "row-9"]


def test_the_seed_draws_the_order_and_never_moves_a_row_to_the_other_split():
    first, second = (choose(KEYS, "train", 100, seed) for seed in (0, 1))
    assert first != second
    assert all(split_of(KEYS[place]) == "train" for place in (*first, *second))


def test_asking_for_more_extends_the_list():
    assert choose(KEYS, "eval", 100, 0)[:30] == choose(KEYS, "eval", 30, 0)


def test_the_choice_does_not_depend_on_the_order_of_the_rows():
    chosen = {KEYS[place] for place in choose(KEYS, "train", 50, 3)}
    backwards = KEYS[::-1]
    assert {backwards[place] for place in choose(backwards, "train", 50, 3)} == chosen


def test_more_rows_than_there_are_is_refused():
    with pytest.raises(ValueError, match=r"1001 train_prompts asked for, the data has \d+; lower train_prompts"):
        choose(KEYS, "train", 1001, 0)
