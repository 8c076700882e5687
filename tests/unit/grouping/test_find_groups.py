"""Groups are read from the log by their pointers."""

from __future__ import annotations

import pytest

from streamadv.errors import BatchLostError
from streamadv.grouping.groups_log import find_groups, read_groups
from streamadv.store.connection import Connection
from tests.support import group_all, logged, pushed_run


def test_groups_that_do_not_follow_each_other_in_the_log_are_found(fake: Connection) -> None:
    run = pushed_run(fake, "r", 9)
    group_all(run)
    pointers = [group.pointer for group in logged(run).values()]
    gone = pointers.pop(4)
    fake.scripts.xdel(run.keys.home.groups, gone.entry)
    assert [group.group_id for group in read_groups(run, pointers)] == [p.group_id for p in pointers]
    some = [pointers[7], pointers[0], gone, pointers[3]]
    assert [group and group.pointer for group in find_groups(run, some)] == [
        None if pointer is gone else pointer for pointer in some
    ]
    with pytest.raises(BatchLostError, match="group g0004 of a named batch is gone"):
        read_groups(run, some)
    assert read_groups(run, []) == []
