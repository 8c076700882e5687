"""What one schedule plans: who pushes what, with which settings, and what is noted of it while it runs."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from typing import Any, Final

from .strands import Process
from .world import World

RUN: Final = "r"
#: Deadline of a group that has one of its own.
SLOW_S: Final = 100.0
#: A reward that comes second.
SECOND_SCORE: Final = 9.0
#: Group and index of a rollout.
Place = tuple[str, int]

OPERATIONS: Final = (
    "push", "push", "push", "single", "many", "group", "run", "groups", "slow", "fail", "cancel", "eval", "later",
    "touch", "score", "unscored", "bare", "turns", "turns", "again",
)  # fmt: skip


class Violation(AssertionError):
    """A promise that was broken."""


@dataclass
class Life:
    """One start of a producer, until it ends or is killed."""

    name: str
    process: Process
    opened: float
    closed: float | None = None  # when it began to leave
    left: float | None = None  # when it had
    is_unheard: bool = False  # whether it has left without the server having heard of it
    leaves_open: bool = False  # whether somebody who was given groups of it left them as they were
    finishes: bool = False  # whether it has begun to say that no more comes
    finished: float | None = None  # when it had said so

    @property
    def end(self) -> float:
        """When it could say nothing more."""
        over = min(self.left if self.left is not None else math.inf, self.process.ended)
        return over if over == math.inf else min(over, self.process.asked)


@dataclass
class Acknowledged:
    """A trajectory that the server has said it has."""

    life: Life
    asked: float
    """When the operation began that pushed it: the server may have said so at any time from then on."""
    when: float
    code: str


@dataclass
class Group:
    """What a producer means to push."""

    id: str
    size: int
    begun: float
    deadline_s: float
    whole: bool = True  # whether all its rollouts are pushed, so that it has to be trained on
    role: str = "train"
    scores: list[Acknowledged] = field(default_factory=list)
    """When its rewards had come, where its producer brings them."""
    touches: list[Acknowledged] = field(default_factory=list)  # when its deadline was put off
    image: bool = False  # whether it was begun with the columns IMAGE

    @property
    def places(self) -> list[Place]:
        return [(self.id, index) for index in range(self.size)]


@dataclass
class Scene:
    """The plan of one schedule, drawn under labels that begin with "scene/"."""

    producers: list[dict[str, Any]]
    trainer_late_s: float  # when the first job starts: until then nothing paces the producers
    ranks: int
    batch_groups: int
    max_staleness: int | None
    deadline_s: float
    save_every: int
    prefetch: int
    each_batch: bool
    workers: int
    redundancy: int
    scored: bool
    needs: bool  # whether the chain needs a column, so that groups without it become dead letters
    is_narrow: bool  # whether the run has room for eight rollouts of the greatest size, else for very many
    archive: bool  # whether the run keeps everything until it is archived
    prompts: int  # how many prompts all producers play for two epochs, after what each does by itself
    more_prompts: int  # how many prompts of another set they play at the same time
    groupers: int
    successor_s: float
    """When a launcher that has lost sight of the job starts another one beside it; 0 = never."""
    stops_after: int  # after how many batches the trainer ends the run, whatever is queued; 0 = never
    stateless: bool  # whether the trainer begins without a checkpoint's state, after the last commit
    folder: bool
    """Whether the trainer saves by `checkpoint` and goes on by `resume`, else by `state_dict` and `commit`."""
    in_parts: bool  # whether pages and slices are so small that much goes in more than one call
    behind: bool
    """Whether the server's clock is set back before much has come, so that what is lost leaves its ids to others."""
    calm_s: float  # seconds of the world after which nothing fails any more


#: Of all schedules, those whose scene has everything that is drawn for it. In the others few producers push few groups,
#: and a feature is there with this probability each: most faults need no more, and a small schedule takes a third.
LARGE: Final = 0.03
FEATURE: Final = 0.1
#: Whether a producer carries an operation out at one of its PLACES, in large and in small scenes.
OPERATES: Final = (0.5, 0.3)
PLACES: Final = 6


def draw_scene(world: World) -> Scene:
    """The scene of this world's plan."""
    is_large = world.plan.draw(lambda source: source.random() < LARGE)

    def pick(label: str, plain: Any, *others: Any, often: float = 1.0) -> Any:
        """often: in how many of the schedules that are not large it is drawn, else it is plain."""

        def draw(source: random.Random) -> Any:
            return source.choice((plain, *others)) if is_large or source.random() < often else None

        chosen = world.plan.choose(f"scene/{label}", draw)
        return plain if chosen is None else chosen

    def operation(source: random.Random) -> list[Any] | None:
        if source.random() >= OPERATES[not is_large]:
            return None
        return [source.choice(OPERATIONS), source.choice((0.0, 0.0, 0.0, 0.1, 1.0, 4.0))]

    producers: list[dict[str, Any]] = []
    for number in range(3):
        plain, often = ("none", (0.6, 0.2)[number - 1]) if number else ("blocking", 1.0)
        kind = pick(f"p{number}", plain, "blocking", "named", "asyncio", often=often)
        if kind == "none":
            continue
        operations = []
        for place in range(PLACES):
            drawn = world.plan.choose(f"scene/p{number}/{place}", operation)
            if drawn is not None:
                operations.append((place, *drawn))
        hands = pick(f"p{number}/hands", 1, 1, 2, 3)
        lingers = pick(f"p{number}/lingers", 0.0, 0.3, 3.0, 45.0, often=0.1)
        serves = ("serve",) if kind == "asyncio" else ()  # as a gateway does, for which the run does not wait
        ends = pick(f"p{number}/ends", "finish", "finish", "close", *serves)
        plays = pick(f"p{number}/plays", 0.0, 0.2, 3.0, 6.0)
        # Prompts after which it leaves the others to the first producer; 0 = never.
        leaves = pick(f"p{number}/leaves", 0, 1, 2, often=0.2) if producers else 0
        producers.append(
            {"kind": kind, "hands": [operations[hand::hands] for hand in range(hands)]}
            | {"plays": plays, "lingers": lingers, "ends": ends, "leaves": leaves}
        )
    if all(producer["ends"] != "finish" for producer in producers):
        producers[0]["ends"] = "finish"
    return Scene(
        producers,
        trainer_late_s=pick("trainer_late_s", 0.0, 0.0, 4.0),
        ranks=pick("ranks", 1, 2, often=3 * FEATURE),
        batch_groups=pick("batch_groups", 2, 1),
        max_staleness=pick("max_staleness", -1, 1, 1, 2),
        deadline_s=pick("deadline_s", 20.0, *((120.0, 4.0) if is_large else (12.0, 12.0, 4.0))),
        save_every=pick("save_every", 1, 2, 3),
        prefetch=pick("prefetch", 1, 0),
        each_batch=pick("each_batch", False, True),
        workers=pick("workers", 1, 2, often=2 * FEATURE),
        redundancy=pick("redundancy", 0, 1, often=2 * FEATURE),
        scored=pick("scored", False, True, often=3 * FEATURE),
        needs=pick("needs", False, True, often=2 * FEATURE),
        folder=pick("folder", False, True, often=4 * FEATURE),
        is_narrow=pick("is_narrow", False, True, often=2 * FEATURE),
        archive=pick("archive", False, True, often=2 * FEATURE),
        prompts=(prompts := pick("prompts", 0, 5, often=4 * FEATURE)),
        groupers=pick("groupers", 1, 2, often=3 * FEATURE),
        successor_s=pick("successor_s", 0.0, 6.0, 12.0, 25.0, often=3 * FEATURE),
        stops_after=pick("stops_after", 0, 1, 3, often=FEATURE),
        stateless=pick("stateless", False, True, often=3 * FEATURE),
        in_parts=pick("in_parts", False, True, often=4 * FEATURE),
        behind=pick("behind", False, True, often=2 * FEATURE),
        calm_s=pick("calm_s", 60.0, *(() if is_large else (10.0, 20.0, 20.0, 30.0))),
        more_prompts=pick("prompts/more", 0, 3, often=0.3) if prompts else 0,
    )
