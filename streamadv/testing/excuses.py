"""What docs/reference/guarantees.md allows: which trajectories may be gone, and which have to be trained on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from .scene import Acknowledged, Group, Life, Place
from .strands import Process
from .world import World

if TYPE_CHECKING:
    from .pipeline import Pipeline

#: Of times that are compared: a reply may have been under way.
SLACK_S: Final = 0.01
#: Seconds without a disturbance in which a producer notices what the server has lost, and sends it again: it asks every
#: 10 s.
HEARD_S: Final = 15.0


def is_quiet(world: World, process: Process, since: float, until: float) -> bool:
    """Whether nothing befell the server or the process's requests in this time."""
    return all(last < since or first > until for first, last in (*world.outages, *process.disturbances))


def _was_heard(world: World, process: Process, since: float, until: float, seconds: float = HEARD_S) -> bool:
    """Whether nothing befell them for so many seconds on end."""
    for first, last in sorted((*world.outages, *process.disturbances)):
        if min(first, until) - since >= seconds:
            return True
        since = max(since, last)
    return until - since >= seconds


def lost_for_good(pipeline: Pipeline, life: Life, asked: float, when: float) -> bool:
    """Whether what a producer was told between these times may be gone: the server has lost it, and the producer had
    left before, or was killed, or has left unheard, before it could say it again.
    """
    world, scene, was_lost = pipeline.world, pipeline.scene, False
    # Where groups are held up, lost ones are admitted again once others have ended.
    waits_s = scene.deadline_s if (scene.max_staleness or -1) >= 0 or scene.is_narrow else 0.0
    for at, since in world.lost:
        # What was lost once was pushed again at some time before the end, and may be lost again.
        if (since - SLACK_S <= when and asked <= at + SLACK_S) or (was_lost and since <= life.end):
            may_be_unheard = life.is_unheard or life.left is None
            if life.end <= at or (
                may_be_unheard and not _was_heard(world, life.process, at, life.end, HEARD_S + waits_s)
            ):
                return True
            was_lost = True
    return False


def nobody_knew(pipeline: Pipeline) -> bool:
    """Whether a producer that the server had lost was killed before it could say so again."""
    return any(
        at <= life.process.ended <= at + HEARD_S and life.opened <= at
        for at, _ in pipeline.world.lost
        for life in pipeline.lives
    )


def is_excused(pipeline: Pipeline, acknowledged: list[Acknowledged]) -> bool:
    """Whether nobody could push again what the server has lost."""
    return all(lost_for_good(pipeline, each.life, each.asked, each.when) for each in acknowledged)


def was_lost_twice(pipeline: Pipeline, place: Place) -> bool:
    """Whether a trainer that has ended had trained on it, and the server lost something since it was pushed."""
    lost = [
        at
        for at, _ in pipeline.world.lost
        for each in pipeline.acknowledged[place]
        if pipeline.trained[place] and each.asked <= at + SLACK_S
    ]
    return any(end > min(lost) for end in pipeline.job_ends) if lost else False


def was_untouched(pipeline: Pipeline, group: Group) -> bool:
    """Whether the server has lost that the group's deadline was put off."""
    return any(
        since - SLACK_S <= each.when and each.asked <= at + SLACK_S
        for at, since in pipeline.world.lost
        for each in group.touches
    )


def may_be_over(pipeline: Pipeline, group: Group) -> bool:
    """Whether a part of the group was lost, and was not pushed again before its deadline, or by nobody."""
    if was_untouched(pipeline, group):
        return True
    acknowledged = [pipeline.acknowledged.get(place, []) for place in group.places]
    if group.scores:
        acknowledged.append(group.scores)
    return any(is_excused(pipeline, each) for each in acknowledged) or any(
        not _was_heard(pipeline.world, one.life.process, at, group.begun + group.deadline_s)
        for at, since in pipeline.world.lost
        for each in acknowledged
        for one in each
        if since - SLACK_S <= one.when and one.asked <= at + SLACK_S
    )


def was_open_again(pipeline: Pipeline, group: Group) -> bool:
    """Whether the server lost that the group was complete, when its deadline was over: then it ends by that."""
    due = group.begun + group.deadline_s
    return any(group.begun <= at and due <= at + HEARD_S for at, _ in pipeline.world.lost)


def may_be_dropped(pipeline: Pipeline, group: Group) -> bool:
    """Whether the group may have ended otherwise: a part of it was lost, or came after its deadline."""
    due = group.begun + group.deadline_s
    parts = [
        *(pipeline.acknowledged[place] for place in group.places),
        *([group.scores] if group.scores else []),
    ]
    last = max(min(each.when for each in part) for part in parts)
    # Until a clock that was set back has passed its old time, deadlines do not wait for a grouper that is behind.
    was_set_back = any(
        by < 0.0
        and due <= at - by + SLACK_S
        and (at - SLACK_S <= due or not _was_grouped(pipeline, last, at))
        for at, by in pipeline.world.jumps
    )
    if was_set_back or may_be_over(pipeline, group):
        return True
    if pipeline.scene.scored:  # its rewards may have come after its deadline
        return pipeline.world.time > group.begun + group.deadline_s
    return last > group.begun + group.deadline_s - 1.0


def _was_grouped(pipeline: Pipeline, since: float, until: float) -> bool:
    """Whether a grouper was there in this time that nothing kept from its work."""
    return any(
        process.name.startswith("grouper")
        and process.began <= since
        and until <= process.ended
        and is_quiet(pipeline.world, process, since, until)
        for process in pipeline.world.processes
    )


def must_train(pipeline: Pipeline) -> list[Place]:
    """Places of groups whose members were all acknowledged, and that nothing but training may end."""
    if pipeline.scene.redundancy:  # another member of the group may stand for each of them
        return []
    groups = [group for group in whole_groups(pipeline) if not may_be_dropped(pipeline, group)]
    return [place for group in groups for place in group.places if not was_lost_twice(pipeline, place)]


def whole_groups(pipeline: Pipeline) -> list[Group]:
    """Groups whose members were all acknowledged, and that nothing but training may end."""
    return [
        group
        for group in pipeline.groups.values()
        if group.whole
        and group.role == "train"
        and all(place in pipeline.acknowledged for place in group.places)
        # its rewards may have come after its deadline
        and not (pipeline.scene.scored and pipeline.world.time > group.begun + group.deadline_s)
    ]
