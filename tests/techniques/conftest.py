"""Assertions in the contract's machinery are told as those of tests are."""

import pytest

pytest.register_assert_rewrite("contract")
