"""A few in each turn of the loop, in their order; whoever goes away holds up nobody."""

import asyncio

from gateway.turnstile import Turnstile


async def test_each_turn_lets_a_few_through_in_their_order() -> None:
    turnstile = Turnstile(per_turn=3)
    turns: list[list[int]] = [[]]

    async def pass_through(number: int) -> None:
        await turnstile.enter()
        turns[-1].append(number)

    passing = [asyncio.create_task(pass_through(number)) for number in range(20)]
    passing[7].cancel()
    while not all(task.done() for task in passing):
        await asyncio.sleep(0)
        turns.append([])
    assert max(len(turn) for turn in turns) <= 3
    assert [number for turn in turns for number in turn] == [number for number in range(20) if number != 7]


async def test_those_who_leave_while_they_wait_take_no_place() -> None:
    turnstile = Turnstile(per_turn=1)
    waiting = [asyncio.create_task(turnstile.enter()) for _ in range(50)]
    await asyncio.sleep(0)
    for task in waiting[1:]:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    await asyncio.wait_for(turnstile.enter(), 30)
    for _ in range(3):  # turns later nobody is counted any more
        await asyncio.sleep(0)
    entering = turnstile.enter()
    try:
        entering.send(None)
    except StopIteration:
        return
    raise AssertionError("nobody was there, and one had to wait")
