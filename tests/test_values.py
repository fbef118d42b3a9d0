"""What a setting may be."""

from __future__ import annotations

import math

import pytest

from agentrl.errors import ConfigError
from agentrl.values import check_number


@pytest.mark.parametrize("value", [3, 10**400])
def test_whole_numbers_of_any_size_are_numbers(value: int) -> None:
    check_number("n", value, 1)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, True, "3", None, 0.5, 10**400, -(10**400)])
def test_what_is_no_number_or_out_of_bounds_is_refused(value: object) -> None:
    with pytest.raises(ConfigError, match="a number from 1 to 9 is expected"):
        check_number("n", value, 1, 9, whole=False)
