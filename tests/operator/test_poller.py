"""The poller: who is asked, and when an answer is worth a pass."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from everloop_operator.core.plan import Poll
from everloop_operator.core.report import TrainerReport
from everloop_operator.loop.lateness import Lateness
from everloop_operator.loop.poller import REQUESTS_PER_SECOND, Poller, pause, turn
from everloop_operator.loop.ports import Key, Unanswered
from tests.operator.builders import report
from tests.operator.one_cluster import clock

KEY = Key("team", "tuned")


async def until(true: Callable[[], bool]) -> None:
    """Lets other tasks run until this holds."""
    async with asyncio.timeout(5):
        for _ in iter(true, True):
            await asyncio.sleep(0.001)


class Answers:
    """A trainer that gives these answers one after the other, and then the last for ever."""

    def __init__(self, *answers: TrainerReport | str) -> None:
        self.answers = list(answers)
        self.asked = 0

    async def ask(self, poll: Poll, token: str) -> TrainerReport:
        self.asked += 1
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, str):
            raise Unanswered(answer)
        return answer


async def test_poller_wakes_on_news_only() -> None:
    """The same answer again is no reason for a pass; silence is, and keeps the last report."""
    woken: list[Key] = []
    trainer = Answers(report(), report(), "ReadTimeout", "ReadTimeout", report(1, "Recovering"))
    poller = Poller(trainer.ask, woken.append, clock, Lateness())
    poller.want(KEY, Poll("127.0.0.9", "u", 1, 0.001), "t")
    await until(lambda: trainer.asked >= 8)
    assert len(woken) == 3
    assert poller.answer(KEY, "another pod").report is None
    known = poller.answer(KEY, "u").report
    assert known is not None
    assert known.state == "Recovering"
    await poller.close()


async def test_the_same_answer_after_silence_is_news() -> None:
    """What was said of the silence must be taken back, though the trainer says what it has said before."""
    seen: list[bool] = []
    trainer = Answers(report(), "ReadTimeout", "ReadTimeout", "ReadTimeout", report())

    def woken(key: Key) -> None:
        seen.append(poller.answer(key, "u").unreachable_since is None)

    poller = Poller(trainer.ask, woken, clock, Lateness())
    poller.want(KEY, Poll("127.0.0.9", "u", 1, 0.001), "t")
    await until(lambda: trainer.asked >= 7)
    assert seen == [True, False, True]
    await poller.close()


async def test_poller_outlives_a_defect() -> None:
    """An answer that nobody foresaw counts as none, and the next one is asked for: the old report must not stand."""

    class Broken(Answers):
        async def ask(self, poll: Poll, token: str) -> TrainerReport:
            answer = await super().ask(poll, token)
            if self.asked == 2:
                raise ZeroDivisionError
            return answer

    trainer, seen = Broken(report()), list[str]()
    poller = Poller(trainer.ask, lambda key: seen.append(poller.answer(key, "u").problem), clock, Lateness())
    poller.want(KEY, Poll("127.0.0.9", "u", 1, 0.001), "t")
    await until(lambda: trainer.asked >= 4)
    assert seen == ["", "ZeroDivisionError", ""]
    await poller.close()


async def test_poller_forgets_the_old_pod() -> None:
    """A new pod starts without a report; nobody to ask ends the asking."""
    poller = Poller(Answers(report()).ask, lambda key: None, clock, Lateness())
    poller.want(KEY, Poll("127.0.0.9", "u", 1, 60.0), "t")
    await until(lambda: poller.answer(KEY, "u").report is not None)
    poller.want(KEY, Poll("127.0.0.8", "v", 2, 60.0), "t")
    assert poller.answer(KEY, "v").report is None
    poller.want(KEY, None)
    assert poller.answer(KEY, "v").report is None
    await poller.close()


@pytest.mark.parametrize(
    ("every", "pods", "unreachable", "seconds"),
    [
        (3.0, 1, False, 3.0),
        (3.0, 300, False, 3.0),
        (3.0, 10_000, False, 100.0),
        (3.0, 10_000, True, 3.0),
        (1.0, 10_000, False, 1.0),
    ],
)
def test_many_pods_that_do_well_are_asked_less_often(
    every: float, pods: int, unreachable: bool, seconds: float
) -> None:
    """The sum of their questions is bounded; one that is silent, or that somebody waits for, keeps its pace."""
    assert pause(every, pods, unreachable=unreachable) == seconds


def test_first_questions_keep_the_pace() -> None:
    """Pods that come all at once are asked one after the other; one that comes later does not wait for its turn."""
    last, turns = 0.0, []
    for _ in range(10_000):
        last = turn(1000.0, last)
        turns.append(last)
    assert turns[0] == 1000.0
    assert turns[-1] == pytest.approx(1000 + 9_999 / REQUESTS_PER_SECOND)
    assert turn(5000.0, last) == 5000.0


async def test_another_question_is_asked_at_once() -> None:
    """A request for snapshots does not wait for the pause to end."""
    trainer = Answers(report())
    poller = Poller(trainer.ask, lambda _: None, clock, Lateness())
    poller.want(KEY, Poll("127.0.0.9", "u", 1, 3600.0), "t")
    await until(lambda: trainer.asked == 1)
    poller.want(KEY, Poll("127.0.0.9", "u", 1, 3600.0), "t")
    await asyncio.sleep(0.01)
    assert trainer.asked == 1
    poller.want(KEY, Poll("127.0.0.9", "u", 1, 3600.0, "move"), "t")
    await until(lambda: trainer.asked == 2)
    await poller.close()


async def test_pods_that_rest_cost_no_task() -> None:
    """Of thousands, each task would hold more than all that is known of its pod."""
    tasks = len(asyncio.all_tasks())
    trainer = Answers(report())
    poller = Poller(trainer.ask, lambda _: None, clock, Lateness())
    for number in range(50):
        poller.want(Key("team", f"s{number}"), Poll("127.0.0.9", "u", 1, 3600.0), "t")
    await until(lambda: trainer.asked == 50 and len(asyncio.all_tasks()) == tasks)
    await poller.close()


async def test_another_question_during_one_is_asked_after_it() -> None:
    """It is neither lost nor asked beside the first; and nobody is asked any more once all is closed."""
    go, asked = asyncio.Event(), list[str]()

    async def ask(poll: Poll, token: str) -> TrainerReport:
        asked.append(poll.snapshot)
        await go.wait()
        return report()

    poller = Poller(ask, lambda _: None, clock, Lateness())
    poller.want(KEY, Poll("127.0.0.9", "u", 1, 3600.0), "t")
    await until(lambda: asked == [""])
    poller.want(KEY, Poll("127.0.0.9", "u", 1, 3600.0, "move"), "t")
    await asyncio.sleep(0.01)
    assert asked == [""]
    go.set()
    await until(lambda: asked == ["", "move"])
    poller.want(KEY, Poll("127.0.0.9", "u", 1, 0.05), "t")
    await poller.close()
    so_far = len(asked)
    await asyncio.sleep(0.1)
    assert len(asked) == so_far
