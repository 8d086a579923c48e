"""The caching allocator's rules, one by one."""

from __future__ import annotations

from shardwise.foresight.rehearse.allocator import MIB, Allocator, Event, replay


def test_small_ones_share_a_segment_of_2_mib() -> None:
    found = Allocator()
    found.take(0, 1)
    found.take(1, 512 * 1024)
    assert (found.allocated, found.reserved) == (512 + 512 * 1024, 2 * MIB)


def test_up_to_10_mib_come_out_of_20_and_more_alone() -> None:
    found = Allocator()
    found.take(0, 5 * MIB)
    assert found.reserved == 20 * MIB
    found.take(1, 15 * MIB)  # the rest of it
    assert found.reserved == 20 * MIB
    found.take(2, 11 * MIB)
    assert found.reserved == 32 * MIB


def test_a_rest_of_up_to_1_mib_goes_along() -> None:
    found = Allocator()
    found.take(0, 21 * MIB)
    found.give(0)
    found.take(1, 21 * MIB + MIB // 2)
    assert found.allocated == 22 * MIB  # the whole piece, in steps of 2 MiB


def test_free_neighbours_join_and_the_best_fit_is_taken() -> None:
    found = Allocator()
    for number in range(4):
        found.take(number, 5 * MIB)
    for number in (1, 0, 2):
        found.give(number)
    found.take(4, 15 * MIB)
    assert (found.reserved, found.allocated) == (20 * MIB, 20 * MIB)


def test_streams_do_not_share() -> None:
    found = Allocator()
    found.take(0, 16 * MIB)
    found.give(0)
    found.take(1, 16 * MIB, "communication")
    assert found.reserved == 32 * MIB


def test_a_step_again_takes_no_more() -> None:
    step = [Event(1, 30 * MIB), Event(2, 12 * MIB), Event(1, 0), Event(2, 0)]
    once, twice = (replay([Event(0, 4 * MIB)], step, times) for times in (1, 2))
    assert once.most_reserved == twice.most_reserved == (20 + 30) * MIB  # the 12 fit into what is left of the 20
    assert twice.most_allocated == (4 + 30 + 12) * MIB
