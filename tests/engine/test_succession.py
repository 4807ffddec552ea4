"""For how long a stream that nobody knows may still come from an earlier engine."""

from engine.succession import Succession

EPOCH = 5
A, B = b"gateway a", b"gateway b"


def test_nothing_can_come_where_no_engine_was_before() -> None:
    succession = Succession(EPOCH, follows=False, until_s=15.0)
    succession.greet(A, 0)
    succession.greet(B, EPOCH)  # which it gave all it had, before its connection broke
    assert not succession.may_bring(0.0)


def test_an_engine_that_follows_another_waits_for_gateways_that_are_not_back() -> None:
    succession = Succession(EPOCH, follows=True, until_s=15.0)
    assert succession.may_bring(14.9) and not succession.may_bring(15.0)


def test_a_gateway_that_is_there_may_bring_something_until_it_says_that_it_has() -> None:
    succession = Succession(EPOCH, follows=True, until_s=15.0)
    succession.greet(A, 3)
    succession.greet(B, 4)
    succession.greet(A, 3)
    succession.handed_over(A)
    assert succession.may_bring(100.0)
    succession.handed_over(B)
    assert not succession.may_bring(100.0) and succession.may_bring(1.0), "others may not be back yet"


def test_a_gateway_that_knew_another_engine_says_that_there_was_one() -> None:
    succession = Succession(EPOCH, follows=False, until_s=15.0)
    succession.greet(A, 3)
    succession.handed_over(A)
    assert succession.may_bring(1.0) and not succession.may_bring(15.0)


def test_a_gateway_that_says_it_has_given_all_is_waited_for_no_longer() -> None:
    succession = Succession(EPOCH, follows=True, until_s=15.0)
    succession.greet(A, 3)
    succession.greet(A, EPOCH)  # its HandedOver was lost with the connection
    assert not succession.may_bring(100.0)


def test_a_gateway_that_is_lost_is_waited_for_no_longer() -> None:
    succession = Succession(EPOCH, follows=True, until_s=0.0)
    succession.greet(A, 3)
    succession.lose(A)
    assert not succession.may_bring(1.0)
