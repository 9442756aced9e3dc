"""The batch triangle is exact: train = micro x accumulation x data ranks, or an error with all the numbers."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from hf_dist.config import BatchSizes, solve_batch
from hf_dist.errors import ConfigError

SIZE = st.integers(1, 64)
MAYBE = st.none() | st.integers(1, 4096)


@given(micro=SIZE, steps=SIZE, ranks=SIZE)
def test_any_two_sizes_give_the_third(micro: int, steps: int, ranks: int) -> None:
    whole = BatchSizes(micro * steps * ranks, micro, steps, ranks)
    assert solve_batch(whole.train, micro, steps, ranks) == whole
    assert solve_batch(None, micro, steps, ranks) == whole
    assert solve_batch(whole.train, None, steps, ranks) == whole
    assert solve_batch(whole.train, micro, None, ranks) == whole


@given(train=MAYBE, micro=MAYBE, steps=MAYBE, ranks=SIZE)
def test_a_solution_keeps_every_given_size_and_an_error_prints_it(
    train: int | None, micro: int | None, steps: int | None, ranks: int
) -> None:
    try:
        sizes = solve_batch(train, micro, steps, ranks)
    except ConfigError as error:
        assert train is not None
        for size in (train, micro or "not set", steps or "not set", ranks):
            assert str(size) in str(error)
        assert error.problems[0].path == "train_batch_size" and error.problems[0].fix.startswith("Set ")
        return
    for given_size, solved in ((train, sizes.train), (micro, sizes.micro), (steps, sizes.accumulation)):
        assert given_size is None or given_size == solved
    assert (sizes.train is None) == (sizes.micro is None)
    if sizes.train is not None and sizes.micro is not None:
        assert sizes.train == sizes.micro * sizes.accumulation * ranks


@given(train=SIZE, micro=SIZE, steps=SIZE, ranks=st.integers(1, 8))
def test_every_remedy_in_the_message_works(train: int, micro: int, steps: int, ranks: int) -> None:
    assume(train != micro * steps * ranks)
    with pytest.raises(ConfigError) as caught:
        solve_batch(train, micro, steps, ranks)
    sizes = {"train_batch_size": train, "train_micro_batch_size_per_gpu": micro, "gradient_accumulation_steps": steps}
    remedy = caught.value.problems[0].fix.removeprefix("Set ").rstrip(".").split(", or ")
    for change in remedy:
        if change.startswith("run on "):
            solve_batch(train, micro, steps, int(change.split()[2]))
        else:
            key, _, size = change.partition(" to ")
            solve_batch(*{**sizes, key: int(size)}.values(), ranks)


def test_nothing_given_leaves_the_micro_batch_open() -> None:
    assert solve_batch(None, None, None, 4) == BatchSizes(None, None, 1, 4)
    assert solve_batch(None, None, 3, 4) == BatchSizes(None, None, 3, 4)


def test_only_the_train_batch_is_split_over_the_ranks() -> None:
    assert solve_batch(32, None, None, 4) == BatchSizes(32, 8, 1, 4)


def test_a_remainder_is_an_error_with_all_four_numbers() -> None:
    with pytest.raises(ConfigError) as caught:
        solve_batch(7, 2, None, 1)
    assert str(caught.value) == (
        "train_batch_size: 7 cannot be train_micro_batch_size_per_gpu (2) x gradient_accumulation_steps (not set) x "
        "data ranks (1): it is not a multiple of 2. Set train_batch_size to 8."
    )


def test_a_wrong_product_names_each_change_that_mends_it() -> None:
    with pytest.raises(ConfigError) as caught:
        solve_batch(32, 4, 2, 2)
    assert str(caught.value) == (
        "train_batch_size: 32 is not train_micro_batch_size_per_gpu (4) x gradient_accumulation_steps (2) x "
        "data ranks (2) = 16. Set train_batch_size to 16, or train_micro_batch_size_per_gpu to 8, "
        "or gradient_accumulation_steps to 4, or run on 4 data ranks."
    )


def test_sizes_below_one_are_all_reported() -> None:
    with pytest.raises(ConfigError) as caught:
        solve_batch(0, -1, 0, 1)
    assert [p.path for p in caught.value.problems] == [
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
    ]
