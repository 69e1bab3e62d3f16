"""Progress: estimates by weight, resumed work does not count as fast, few lines where nobody watches."""

import pytest

from nexus.progress import PLAIN_SECONDS, Meter, _Lines, duration, progress


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("seconds, text", [(0.4, "0 s"), (59.4, "59 s"), (59.6, "1 min 00 s"), (200, "3 min 20 s"),
                                           (3599.7, "1 h 00 min"), (3900, "1 h 05 min")])
def test_durations(seconds: float, text: str):
    assert duration(seconds) == text


def test_estimate_is_by_weight():
    clock = Clock()
    meter = Meter("x", total=10.0, unit="cells", clock=clock)
    assert meter.seconds_left is None
    clock.now = 8
    meter.advance(4)
    assert meter.seconds_left == pytest.approx(12)
    assert meter.percent == pytest.approx(40)
    assert meter.text() == "40 %, 8 s, about 12 s left"
    meter.advance(6)
    assert (meter.seconds_left, meter.text()) == (0, "100 %, 8 s")


def test_resumed_work_does_not_distort_the_estimate():
    clock = Clock()
    meter = Meter("x", total=100.0, unit="cells", done=90.0, clock=clock)
    assert meter.seconds_left is None
    assert meter.percent == 90
    clock.now = 10
    meter.advance(2)
    assert meter.seconds_left == pytest.approx(40)


def test_nothing_to_do():
    assert Meter("x", total=0, unit="cells").percent == 100
    with progress("x", total=0):
        pass


def test_bytes_say_how_many():
    meter = Meter("x", total=5_000_000, unit="bytes", done=1_500_000)
    assert meter.text().startswith("30 %, 1.5 MB of 5.0 MB")


def test_few_lines_where_nobody_watches(capsys):
    clock = Clock()
    lines = _Lines("sweep", 100.0, "cells", clock=clock)
    for _ in range(100):
        clock.now += 0.5
        lines.advance(1)
    lines.show(last=True)
    out, err = capsys.readouterr()
    assert out == ""
    shown = err.splitlines()
    assert len(shown) == 50 / PLAIN_SECONDS
    assert shown[0] == "sweep: 20 %, 10 s, about 40 s left"
    assert shown[-1] == "sweep: 100 %, 50 s"


@pytest.mark.parametrize("step, shown", [(15, ["50 %, 15 s, about 15 s left", "100 %, 30 s"]), (3, ["100 %, 6 s"]),
                                         (0.4, [])])
def test_long_work_ends_with_one_last_line(capsys, step: float, shown: list[str]):
    clock = Clock()
    lines = _Lines("sweep", 2.0, "cells", clock=clock)
    for _ in range(2):
        clock.now += step
        lines.advance(1)
    lines.show(last=True)
    assert capsys.readouterr().err.splitlines() == [f"sweep: {line}" for line in shown]


def test_notes_come_at_once(capsys):
    with progress("sweep", total=2) as bar:
        bar.note("3 cells were measured before")
        assert capsys.readouterr().err == "sweep: 3 cells were measured before\n"
        bar.advance(2)
    assert capsys.readouterr() == ("", "")


def test_bar_on_a_terminal(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    with progress("sweep [red]", total=4.0, done=1.0) as bar:
        bar.note("[a] note")
        bar.advance(1)
    out, err = capsys.readouterr()
    assert out == ""
    assert "sweep [red]: [a] note" in err and "sweep [red] " in err and "50 %" in err


def test_an_error_passes_through(capsys):
    with pytest.raises(KeyError), progress("sweep", total=4.0) as bar:
        bar.advance(1)
        raise KeyError
    assert "100 %" not in capsys.readouterr().err
