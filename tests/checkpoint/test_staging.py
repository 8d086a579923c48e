"""Copies beside the next step, on a device that is only played: its work is done when somebody waits for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from shardwise.checkpoint import staging
from shardwise.checkpoint.staging import Staging, StagingSource


class Stream:
    """Work that was asked for and is done in order, once somebody waits for it."""

    def __init__(self, *_: Any) -> None:
        self.asked: list[Callable[[], None]] = []
        self.done = 0

    def wait_stream(self, other: Stream) -> None:
        until = len(other.asked)
        self.asked.append(lambda: other.catch_up(until))

    def catch_up(self, until: int | None = None) -> None:
        while self.done < (len(self.asked) if until is None else until):
            self.done += 1
            self.asked[self.done - 1]()


class Event:
    def __init__(self, streams: dict[str, Stream]) -> None:
        self._streams = streams

    def record(self) -> None:
        self._of = self._streams["now"]
        self._at = len(self._of.asked)

    def query(self) -> bool:
        return self._of.done >= self._at

    def wait(self) -> None:
        self._streams["now"].asked.append(self.synchronize)

    def synchronize(self) -> None:
        self._of.catch_up(self._at)


@pytest.fixture
def compute(monkeypatch: pytest.MonkeyPatch) -> Stream:
    """The stream that trains."""
    main, fill = Stream(), staging._fill
    streams = {"now": main}

    @contextmanager
    def within(stream: Stream) -> Iterator[None]:
        before, streams["now"] = streams["now"], stream
        yield
        streams["now"] = before

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "Event", lambda blocking: Event(streams))
    monkeypatch.setattr(torch.cuda, "stream", within)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: streams["now"])
    monkeypatch.setattr(staging, "host_buffers", lambda sizes, _: [torch.zeros(s, dtype=torch.uint8) for s in sizes])
    monkeypatch.setattr(staging, "_fill", lambda host, parts, stream: stream.asked.append(lambda: fill(host, parts)))
    return main


CUDA = torch.device("cuda")


def stage(kept: Staging, value: torch.Tensor, steady: bool = True) -> Any:
    return kept.stage([StagingSource(value.shape, value.dtype, [value], steady)], CUDA)


@pytest.mark.parametrize("settles", [True, False])
def test_an_update_waits_for_the_copy(compute: Stream, settles: bool) -> None:
    """And without that the copy would be of a later state: the device does as it likes in between."""
    kept, value = Staging(), torch.ones(3)
    compute.asked.append(lambda: value.fill_(2.0))  # the last update is still to be done when the save is asked for
    staged = stage(kept, value)
    if settles:
        kept.settle()
    compute.asked.append(lambda: value.fill_(9.0))  # the next update
    compute.catch_up()
    assert staged.wait()[0].tolist() == [2.0 if settles else 9.0] * 3 and value[0] == 9.0


def test_it_holds_nobody_up_and_is_forgotten_once_it_is_done(compute: Stream) -> None:
    kept = Staging()
    kept.settle()
    staged = stage(kept, torch.ones(2))
    assert not staged.copied.query() and not compute.asked, (
        "nothing was waited for, nothing asked of the compute stream"
    )
    kept.settle()
    kept.settle()  # from another stream, say
    assert len(compute.asked) == 2
    compute.catch_up()
    assert staged.copied.query()
    kept.settle()
    assert len(compute.asked) == 2


def test_a_buffer_may_change_before_the_update(compute: Stream) -> None:
    """A forward may write to it."""
    kept, buffer = Staging(), torch.ones(3)
    staged = stage(kept, buffer, steady=False)
    buffer.zero_()
    assert staged.wait()[0].tolist() == [1.0] * 3


def test_the_memory_is_kept_while_sizes_are_the_same(compute: Stream) -> None:
    kept = Staging()
    first, second = (stage(kept, torch.full((3,), float(n))) for n in range(2))
    assert first.tensors[0].data_ptr() == second.tensors[0].data_ptr()
    assert second.wait()[0].tolist() == [1.0] * 3
    assert stage(kept, torch.ones(4)).wait()[0].tolist() == [1.0] * 4


def test_parts_follow_each_other() -> None:
    parts = (torch.full((n, 2), float(n)) for n in (1, 2, 3))
    (made,) = Staging().stage([StagingSource(torch.Size((6, 2)), torch.float32, parts)], torch.device("cpu")).wait()
    assert made[:, 0].tolist() == [1, 2, 2, 3, 3, 3]
