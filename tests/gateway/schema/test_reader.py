"""Token ids from outside."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.schema.reader import check_token_ids
from streamkv.errors import InvalidField


@given(st.lists(st.one_of(st.integers(-3, 12), st.booleans(), st.floats(0, 3), st.just(2**64), st.none()), max_size=6))
def test_token_ids_are_whole_numbers_in_range_and_the_first_other_is_named(values: list[object]) -> None:
    wrong = [index for index, value in enumerate(values) if type(value) is not int or not 0 <= value < 10]
    if not wrong:
        assert check_token_ids(values, 10, "x") == values
    else:
        with pytest.raises(InvalidField) as caught:
            check_token_ids(values, 10, "x")
        assert caught.value.field == f"x[{wrong[0]}]"
