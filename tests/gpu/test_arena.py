"""Device memory is cut into blocks that do not meet, and every byte is counted."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpipar.ops.cuda.arena import ALIGNMENT, GRANULE, SMALLEST, Arena, Pool

ROOM = 1 << 40


class Driver:
    """Stands for cudaMalloc and cudaFree; the first address after all others."""

    def __init__(self, size: int = ROOM) -> None:
        self.left, self.next, self.given = size, ALIGNMENT, {}

    def reserve(self, size: int) -> int:
        if size > self.left:
            raise MemoryError
        address, self.next = self.next, self.next + size
        self.given[address] = size
        self.left -= size
        return address

    def release(self, address: int) -> None:
        self.left += self.given.pop(address)


# Bytes to take, or which of the blocks in use to give back
WORDS = st.one_of(
    st.tuples(st.just("take"), st.integers(1, 3 * SMALLEST)),
    st.tuples(st.just("take"), st.integers(1, 4096)),
    st.tuples(st.just("give"), st.integers(0, 1 << 16)),
)


@settings(max_examples=40, deadline=None)
@given(st.lists(WORDS, max_size=60))
def test_blocks_do_not_meet_and_all_comes_back(words) -> None:
    driver = Driver()
    arena, used, peak, taken = Arena(driver.reserve), {}, 0, []
    for word, number in words:
        if word == "take":
            address = arena.take(number)
            assert address % ALIGNMENT == 0 and address not in used
            used[address] = -(-number // ALIGNMENT) * ALIGNMENT
            taken.append(address)
        elif used:
            address = list(used)[number % len(used)]
            arena.give(address)
            del used[address]
        spans = sorted((a, a + size) for a, size in used.items())
        for (_, end), (begin, _) in itertools.pairwise(spans):
            assert end <= begin
        for begin, end in spans:
            assert any(a <= begin and end <= a + s for a, s in driver.given.items())
        assert arena.now == sum(used.values())
        peak = max(peak, arena.now)
        assert arena.peak == peak and arena.reserved == sum(driver.given.values())
    for address in used:
        arena.give(address)
    assert arena.now == 0 and sorted(arena.spare()) == sorted(driver.given)
    again = Arena(Driver().reserve)
    assert repeat(again, words) == taken, "the same requests, other addresses"


def repeat(arena: Arena, words: list) -> list[int]:
    used, taken = [], []
    for word, number in words:
        if word == "take":
            used.append(arena.take(number))
            taken.append(used[-1])
        elif used:
            arena.give(used.pop(number % len(used)))
    return taken


def step(pool: Pool) -> list[int]:
    """Blocks of a forward and a backward pass."""
    saved = [pool.malloc(size) for size in (3 << 20, 70 << 20, 5000, 1)]
    inner = pool.malloc(90 << 20)
    pool.free(inner)
    for address in reversed(saved):
        pool.free(address)
    return [*saved, inner]


def test_the_next_step_asks_the_driver_for_nothing_and_finds_its_addresses() -> None:
    driver = Driver()
    pool = Pool(driver.reserve, driver.release, lambda: 0)
    first, asked, peak = step(pool), pool.reservations, pool.peak
    pool.reset_peak()
    assert pool.now == pool.peak == 0
    # Where the first one grew there may be more room now.
    assert [step(pool) for _ in range(3)] == [step(pool)] * 3
    assert pool.reservations == asked and pool.peak == peak
    assert peak == sum([163 << 20, 5120, 512]) and len(first) == 5


def test_a_block_stays_with_its_stream() -> None:
    driver, stream = Driver(), 0
    pool = Pool(driver.reserve, driver.release, lambda: stream)
    kept = pool.malloc(1000)
    pool.free(kept)
    stream = 8
    assert pool.malloc(1000) != kept
    stream = 0
    assert pool.malloc(1000) == kept
    base, size = pool.base_of(kept + 700)
    assert (base, size) == (kept, SMALLEST)


def test_a_graph_has_memory_of_its_own() -> None:
    driver = Driver()
    pool = Pool(driver.reserve, driver.release, lambda: 0)
    before = pool.malloc(1000)
    inner = pool.inner()
    pool.use(inner)
    first = pool.malloc(3000)
    pool.free(first)
    second = pool.malloc(4000)
    pool.use(None)
    # It is counted, and nobody else gets it.
    assert pool.now == 1024 + GRANULE and second == first
    after = pool.malloc(GRANULE)
    assert not first <= after < first + GRANULE
    pool.free(second)
    pool.drop(inner)
    pool.free(before)
    pool.free(after)
    assert pool.now == 0


def test_memory_that_is_short_is_given_back_before_an_error() -> None:
    driver, stream = Driver(200 << 20), 0
    pool = Pool(driver.reserve, driver.release, lambda: stream)
    pool.free(pool.malloc(100 << 20))
    stream = 8
    # The whole device but what nobody uses
    kept = pool.malloc(150 << 20)
    assert pool.reserved == 150 << 20
    with pytest.raises(MemoryError):
        pool.malloc(60 << 20)
    pool.free(kept)
    pool.limit = lambda: 120 << 20
    assert pool.malloc(50 << 20) == kept
    stream = 16
    with pytest.raises(MemoryError, match="may be reserved"):
        pool.malloc(GRANULE)


def test_a_block_given_back_in_the_middle_of_another_request_is_noted() -> None:
    """As a collection of garbage does it."""
    driver = Driver()
    pool = Pool(lambda size: pool.free(kept) or driver.reserve(size), int, lambda: 0)
    kept = 0
    pool._reserve = driver.reserve
    kept = pool.malloc(SMALLEST)
    pool._reserve = lambda size: pool.free(kept) or driver.reserve(size)
    other = pool.malloc(SMALLEST)
    assert other != kept and pool.now == SMALLEST
    assert pool.malloc(SMALLEST) == kept
