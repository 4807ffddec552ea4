"""One ledger for several gateways: over real links, and what a gateway leaves behind when it dies."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gateway.crew_link import Link, LinkLost, LinkRefusal, Told, connect
from gateway.limits import Allowance, Ledger
from gateway.shared_books import LedgerDesk, LinkedBooks
from tests.support.running_gateway import eventually

TWO_AT_ONCE = Allowance(max_concurrent=2)
TOKENS = Allowance(tokens_per_minute=100)


@contextlib.asynccontextmanager
async def ledger_at(path: str, ledger: Ledger) -> AsyncIterator[None]:
    """What the process does that started the gateways."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        desk = LedgerDesk(ledger)

        async def answer(what: str, body: bytes) -> bytes:
            return desk.answer(what, body)

        await Link(
            reader,
            writer,
            answer,
            lambda message: desk.take(message.what, message.body),  # type: ignore[union-attr]
        ).run()
        desk.close()

    server = await asyncio.start_unix_server(serve, path)
    try:
        yield
    finally:
        server.close()


async def nothing(what: str, body: bytes) -> bytes:
    return b""


@contextlib.asynccontextmanager
async def gateway(path: str) -> AsyncIterator[LinkedBooks]:
    books = LinkedBooks()
    books.link = await connect(path, nothing)
    running = asyncio.create_task(books.link.run())
    try:
        yield books
    finally:
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running


async def test_limits_hold_for_all_gateways_together(tmp_path: Path) -> None:
    path = str(tmp_path / "link")
    async with ledger_at(path, Ledger()), gateway(path) as first, gateway(path) as second:
        assert not (await first.admit("alice", TWO_AT_ONCE)).refused_by
        assert not (await second.admit("alice", TWO_AT_ONCE)).refused_by
        assert (await first.admit("alice", TWO_AT_ONCE)).refused_by == "concurrency"
        assert not (await first.admit("bob", TWO_AT_ONCE)).refused_by
        second.release("alice")
        assert not (await second.admit("alice", TWO_AT_ONCE)).refused_by
        first.join("carol", TOKENS)
        first.charge("carol", 250)
        assert (await first.look("carol", TOKENS)).num_live == 1
        verdict = await second.admit("carol", TOKENS)
        assert verdict.refused_by == "tokens" and 85 < verdict.retry_after_s <= 91


async def test_a_gateway_that_dies_gives_its_places_back(tmp_path: Path) -> None:
    path, ledger = str(tmp_path / "link"), Ledger()
    async with ledger_at(path, ledger), gateway(path) as first:
        async with gateway(path) as second:
            await second.admit("alice", TWO_AT_ONCE)
            await second.admit("alice", TWO_AT_ONCE)
            assert (await first.admit("alice", TWO_AT_ONCE)).refused_by == "concurrency"
        await eventually(lambda: ledger.look("alice", TWO_AT_ONCE).num_live == 0)
        assert not (await first.admit("alice", TWO_AT_ONCE)).refused_by


async def test_without_the_process_that_keeps_the_ledger_a_gateway_counts_by_itself(tmp_path: Path) -> None:
    path = str(tmp_path / "link")
    async with gateway_of_nobody(path) as books:
        assert not (await books.admit("alice", Allowance(max_concurrent=1))).refused_by
        assert books.link is None


@contextlib.asynccontextmanager
async def gateway_of_nobody(path: str) -> AsyncIterator[LinkedBooks]:
    async with ledger_at(path, Ledger()), gateway(path) as books:
        assert books.link is not None
        books.link._writer.close()
        await eventually(lambda: books.link is None or books.link._is_lost)
        yield books


async def test_what_is_no_question_is_refused_and_the_link_goes_on(tmp_path: Path) -> None:
    path = str(tmp_path / "link")
    async with ledger_at(path, Ledger()), gateway(path) as books:
        assert books.link is not None
        with pytest.raises(LinkRefusal):
            await books.link.ask("nonsense", b"\x93\x01\x02\x03")
        assert not (await books.admit("alice", TWO_AT_ONCE)).refused_by


async def test_questions_without_an_answer_end_with_the_link(tmp_path: Path) -> None:
    path = str(tmp_path / "link")
    arrived = asyncio.Event()

    async def never(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        arrived.set()

    server = await asyncio.start_unix_server(never, path)
    async with gateway(path) as books:
        assert books.link is not None
        books.link.tell(Told("charge", b""))
        asking = asyncio.create_task(books.link.ask("admit"))
        await arrived.wait()
        books.link._writer.close()
        with pytest.raises(LinkLost):
            await asyncio.wait_for(asking, 20)
    server.close()
