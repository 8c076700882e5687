"""Keys: one slot for each shard, shards spread evenly, names that cannot escape."""

from __future__ import annotations

from collections import Counter
from fnmatch import fnmatchcase

import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis.crc import key_slot

from streamadv.errors import SettingError
from streamadv.store.keys import (
    CLUSTER_SLOTS,
    MANY_KINDS,
    SINGLE_KINDS,
    EntryKeys,
    RunKeys,
    ShardKeys,
    check_run_name,
    find_salt,
    key_patterns,
)


def keys_of(run: str, shards: int) -> RunKeys:
    return RunKeys(run, tuple(find_salt(run, shard, shards) for shard in range(shards)))


def every_key(keys: ShardKeys) -> list[str]:
    return [
        *(getattr(keys, kind) for kind in SINGLE_KINDS),
        *(getattr(keys, kind)("a}{b") for kind in MANY_KINDS),
    ]


@pytest.mark.parametrize("shards", [1, 3, 16])
def test_all_keys_of_a_shard_share_a_slot_and_shards_have_their_own_part_of_the_slots(shards: int) -> None:
    for number, shard in enumerate(keys_of("exp/1", shards).shards):
        slots = {key_slot(key.encode()) for key in every_key(shard)}
        assert len(slots) == 1
        assert slots.pop() * shards // CLUSTER_SLOTS == number


def test_keys_are_all_different() -> None:
    keys = keys_of("r", 3)
    names = [name for shard in keys.shards for name in {*every_key(shard)}]
    assert len(names) == len({*names, EntryKeys("r").manifest, EntryKeys("r").manifest_void}) - 2
    assert key_slot(EntryKeys("r").manifest.encode()) == key_slot(EntryKeys("r").manifest_void.encode())


@given(group_id=st.text(min_size=1), shards=st.integers(1, 5))
def test_a_group_lives_in_one_shard(group_id: str, shards: int) -> None:
    keys = keys_of("r", shards)
    assert keys.shard_of(group_id) == keys.shard_of(group_id)
    assert 0 <= keys.shard_of(group_id) < shards


def test_the_shard_of_a_group_is_the_same_in_every_release() -> None:
    keys = keys_of("r", 7)
    assert [keys.shard_of(f"g{number}") for number in range(8)] == [6, 6, 6, 4, 1, 4, 1, 3]


def test_groups_spread_over_the_shards() -> None:
    counts = Counter(keys_of("r", 4).shard_of(f"group-{number}") for number in range(4000))
    assert min(counts.values()) > 850


@pytest.mark.parametrize("name", ["", "a b", "{a}", "a}", "-a", "ü", "a" * 101, "a\n", "../a", "a:b", "a*"])
def test_names_that_could_reach_other_keys_are_refused(name: str) -> None:
    with pytest.raises(SettingError, match="run is"):
        check_run_name(name)


@pytest.mark.parametrize("name", ["a", "exp-1/seed_2.3", "a" * 100])
def test_usual_names_are_taken(name: str) -> None:
    assert check_run_name(name) == name


def test_patterns_match_every_key_of_the_run_and_of_no_other() -> None:
    run = "exp/1"
    patterns = {kind: key for kind, key in key_patterns(run).items() if not kind.startswith("runs")}
    named = {name for name in vars(ShardKeys) if not name.startswith("_")} - {"tag"}
    assert named == {kind for kind in patterns if not kind.startswith("manifest")}
    keys = [key for shard in keys_of(run, 3).shards for key in every_key(shard)]
    for key in [*keys, EntryKeys(run).manifest, EntryKeys(run).manifest_void]:
        assert any(fnmatchcase(key, pattern) for pattern in patterns.values()), key
    for other in ("exp/10", "exp/", "xexp/1", "EXP/1"):
        for shard in keys_of(other, 2).shards:
            for key in [*every_key(shard), EntryKeys(other).manifest]:
                assert not any(fnmatchcase(key, pattern) for pattern in patterns.values()), key
