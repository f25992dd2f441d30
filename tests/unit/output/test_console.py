"""Lines of progress where there is no terminal."""

from oversmooth.output.console import EVERY, ProgressLines, one_bar


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def lines_of(capsys, seconds_per_step, total, steps):
    """What a log holds after so many steps."""
    clock = Clock()
    tell = ProgressLines("Measuring", clock)
    for done in range(1, steps + 1):
        clock.now += seconds_per_step
        tell(done, total)
    return capsys.readouterr().err.splitlines()


def test_short_work_says_nothing(capsys):
    assert lines_of(capsys, 0.5, 10, 10) == []


def test_long_work_is_estimated_early_and_then_says_a_line_every_ten_seconds(capsys):
    said = lines_of(capsys, 1.0, 100, 35)
    assert said[0] == "Measuring: 2 of 100, about 0:01:38 left"
    assert said[1] == "Measuring: 12 of 100, about 0:01:28 left"
    assert len(said) == 1 + (35 - 2) // EVERY


def test_work_of_half_a_minute_is_not_estimated_but_heard_of(capsys):
    said = lines_of(capsys, 1.0, 30, 29)
    assert said == ["Measuring: 10 of 30, about 0:00:20 left", "Measuring: 20 of 30, about 0:00:10 left"]


def test_work_without_a_known_end_has_no_estimate(capsys):
    assert lines_of(capsys, 6.0, 0, 4) == ["Measuring: 2", "Measuring: 4"]


def test_the_end_of_work_is_no_progress(capsys):
    assert lines_of(capsys, 11.0, 1, 1) == []


def test_where_there_is_no_terminal_a_verb_gets_lines():
    with one_bar("Measuring") as progress:
        assert isinstance(progress, ProgressLines)
        assert progress.name == "Measuring"
