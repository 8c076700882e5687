"""What `mutants.py` breaks, one thing at a time, what nothing can find, and what kept schedules find."""

from __future__ import annotations

from typing import Final, NamedTuple


class Mutant(NamedTuple):
    """Replace `old`, which the file has once, by `new`."""

    file: str
    old: str
    new: str


LUA: Final = "streamadv/lua"
# Lines of code are as long as they are.
# ruff: noqa: E501
MUTANTS: Final[dict[str, Mutant]] = {
    # Turns of a gateway
    "a group that opens again without taking a turn is not written": Mutant(
        f"{LUA}/group/turn.lua", "save_group(group)  -- also", "if reply[1] ~= 'lost' then save_group(group) end  -- also"
    ),
    "turns stay when their slot has ended": Mutant(
        f"{LUA}/group/push.lua", "group.turned and packet.text or ''", "''"
    ),
    # Prompts
    "an end of an older try of a prompt counts": Mutant(
        f"{LUA}/prompts/end_prompts.lua", "if it.now then return it.of.try >= it.now or (IN_WEIGHTS[it.of.outcome] and it.of.try >= base), it.failures end", "if it.now then return true, it.failures end"
    ),
    "a prompt that has ended stays in play": Mutant(
        f"{LUA}/prompts/end_prompts.lua", "change(it.item, not is_begun(it) and 'ended')", "change(it.item, entries[it.item])"
    ),
    "a prompt whose group was dropped is not played again": Mutant(
        f"{LUA}/prompts/end_prompts.lua", "    redis.call('ZADD', keys.prompt_again, whole(it.position), it.item)\n", ""
    ),
    "prompts are begun twice": Mutant(
        f"{LUA}/prompts/lease_prompt.lua", "it.next, it.is_begun = it.next + 1, true", "it.next = it.next + 1"
    ),
    "a prompt that is given back is not played again": Mutant(
        f"{LUA}/prompts/leave_prompts.lua", "if ARGV[1] == 'again' then", "if false then"
    ),
    "prompts are not set back to the checkpoint": Mutant(
        f"{LUA}/prompts/set_back_prompts.lua", "if not (is_lost or is_older) then return 0 end", "if true then return 0 end"
    ),
    "prompts that were set back wait for no producer": Mutant(
        "streamadv/prompts/stored.py", 'is_back = b"is_back" in state', "is_back = False"
    ),
    "a prompt that is left out stays in play": Mutant(
        f"{LUA}/prompts/skip_prompts.lua", "    redis.call('HDEL', keys.prompt_entries, item)\n", ""
    ),
    "a prompt that was left out is played after a lost answer": Mutant(
        f"{LUA}/prompts/skip_prompts.lua", "is_leased and not is_solved and 0 or 1", "is_leased and is_solved and 1 or 0"
    ),
    "a commit does not end its prompts": Mutant(
        f"{LUA}/batch/commit.lua", "    note_prompt_end(prompt, 'trained', figures)\n    local left_out", "    local left_out"
    ),
    "a prompt whose group is lost does not end with its commit": Mutant(
        f"{LUA}/batch/commit.lua",
        "    if applied and exclusions[entry] ~= 'dead' then note_prompt_end(prompt, 'trained', figures) end\n  elseif",
        "    groups = groups + 0\n  elseif",
    ),
    "a prompt ends with a copy of its uncommitted group": Mutant(
        "streamadv/batch/leader.py", "drop_after, self.progress.uncommitted)", "drop_after, set())"
    ),
    "another try of a trained prompt is forgotten with its commit": Mutant(
        "streamadv/batch/progress.py", "is_tried = known in self.tries", "is_tried = False"
    ),
    "prompts are trained on once a try": Mutant(
        "streamadv/prompts/spec.py", 'return group_id.rpartition(":")[0] if GROUP_ID.fullmatch(group_id) else group_id', "return group_id"
    ),
    # Dedupe and groups
    "a push fills a slot twice": Mutant(
        f"{LUA}/group/push.lua",
        "~= string.rep('.', packet.count) then return nil end",
        "== '' then return nil end",
    ),
    "a push does not say which slots it has filled": Mutant(
        f"{LUA}/group/push.lua", "    group.slots = slots\n", ""
    ),
    "a payload is not kept": Mutant(
        f"{LUA}/group/push.lua", "redis.call('PERSIST', packet.key) == 0", "false"
    ),
    "a late push is not in the tombstone": Mutant(
        f"{LUA}/group/push.lua", "  redis.call('HSET', tombstones, id, tombstone)\n", ""
    ),
    "a group that has ended is opened again": Mutant(
        f"{LUA}/group/push.lua",
        "if tombstone then return push_late(spec.id, packets, tombstone, tombstones) end",
        "",
    ),
    "the grouper takes what another one has taken": Mutant(
        f"{LUA}/group/take.lua", "redis.call('XACK', keys.rollouts, ARGV[1], packet.entry) == 1", "true"
    ),
    "the grouper takes what had the id before": Mutant(
        f"{LUA}/group/take.lua", "not is_other(arrived.id, packet) and ", ""
    ),
    "the grouper leaves entries in the stream": Mutant(
        f"{LUA}/group/take.lua",
        "count('rollouts_packets', -redis.call('XDEL', keys.rollouts, unpack(acked)))",
        "count('rollouts_packets', -#acked)",
    ),
    "a group is logged with its members twice": Mutant(
        f"{LUA}/lib/close.lua", "count('grouped', scored)", "count('grouped', 2 * scored)"
    ),
    "a group that ends stays open": Mutant(
        f"{LUA}/lib/close.lua", "  redis.call('ZREM', keys.open, group.id)\n", ""
    ),
    "a group that ends keeps its hash": Mutant(
        f"{LUA}/lib/close.lua", "  redis.call('DEL', group.hash)\n", ""
    ),
    "a group that ends has no tombstone": Mutant(
        f"{LUA}/lib/close.lua",
        "remembered + redis.call('HSET', keys.ended, group.id, letter .. tombstone_of(group))",
        "remembered + 1",
    ),
    "a deadline counts at once": Mutant(
        f"{LUA}/group/expire.lua", "deadline > now or waiting_since <= deadline", "false"
    ),
    "a deadline never counts": Mutant(
        f"{LUA}/group/expire.lua", "deadline > now or waiting_since <= deadline", "true"
    ),
    "withdrawn groups stay": Mutant(f"{LUA}/group/expire.lua", "if is_withdrawn(group) then", "if false then"),
    "a group is not withdrawn": Mutant(
        f"{LUA}/group/withdraw.lua", "redis.call('ZADD', keys.open, 0, ARGV[1])", ""
    ),
    # Batches
    "a batch is named twice": Mutant(
        f"{LUA}/batch/name_batch.lua",
        "if redis.call('HSETNX', keys.batches, ARGV[2], ARGV[3]) == 0 then return 0 end",
        "redis.call('HSET', keys.batches, ARGV[2], ARGV[3])",
    ),
    "a batch has no fence": Mutant(f"{LUA}/batch/name_batch.lua", "-- fenced by session\n", ""),
    "another session of the same epoch passes the fence": Mutant(
        "streamadv/store/scripts.py", "or (ARGV[1]==held[1] and held[2] and session~=held[2])", ""
    ),
    "work is handed out twice": Mutant(
        f"{LUA}/batch/apply_batch.lua",
        "if redis.call('HEXISTS', keys.applied, ARGV[2]) == 1 then return 0 end",
        "",
    ),
    "work is not handed out": Mutant(
        f"{LUA}/batch/apply_batch.lua",
        "for i = last + 1, #ARGV do redis.call('XADD', keys.work, '*', 'work', ARGV[i]) end",
        "",
    ),
    "a batch in flight stays grouped": Mutant(
        f"{LUA}/batch/apply_batch.lua",
        "redis.pcall('HINCRBY', keys.ledger, 'grouped', string.format('%d', -count))",
        "",
    ),
    "results are published twice": Mutant(
        f"{LUA}/batch/publish.lua", "redis.call('XACK', keys.work, ARGV[1], ARGV[2]) == 1", "true"
    ),
    "an output is not kept": Mutant(
        f"{LUA}/batch/publish.lua", "redis.call('PERSIST', keys.output) == 0", "false"
    ),
    "a work item stays in its stream": Mutant(
        f"{LUA}/batch/publish.lua", "if first then redis.call('XDEL', keys.work, ARGV[2]) end\n", ""
    ),
    "a commit leaves the groups": Mutant(
        f"{LUA}/batch/commit.lua",
        "if redis.call('XDEL', keys.groups, entry) == 1 then",
        "if redis.call('XLEN', keys.groups) > 0 then",
    ),
    "a commit counts nothing": Mutant(
        f"{LUA}/batch/commit.lua", "count('trained', trained - left_out)", ""
    ),
    "a commit leaves the payloads": Mutant(
        f"{LUA}/batch/commit.lua",
        "redis.call('UNLINK', unpack(gone, first, math.min(#gone, first + UNLINKED - 1)))",
        "",
    ),
    "a commit leaves the record": Mutant(
        f"{LUA}/batch/commit.lua", "  redis.call('HDEL', keys.batches, ARGV[3])\n", ""
    ),
    "a new session has the epoch before": Mutant(
        f"{LUA}/batch/take_epoch.lua",
        "math.max(current, tonumber(ARGV[2])) + 1)",
        "math.max(current, tonumber(ARGV[2]), 1))",
    ),
    "the version does not move": Mutant(
        f"{LUA}/batch/trained.lua", "redis.call('HSET', keys.trainer, 'version', ARGV[2])", ""
    ),
    "nobody is told that there is room": Mutant(f"{LUA}/batch/trained.lua", "announce()\n", ""),
    "garbage stays": Mutant(
        "streamadv/grouping/housekeeping.py", "items: Any = shard.connection.scripts.lrange(key, 0, count - 1)",
        "items: Any = []",
    ),
    # Producer
    "pushes are not kept for a server that loses them": Mutant(
        "streamadv/producer/resend.py", "        if self._seconds <= 0:\n            return\n", "        return\n"
    ),
    "a heartbeat sends nothing again": Mutant(
        "streamadv/producer/logic.py",
        "has_all = yield from self._resend.check(manifest.keys.shards, first=say_open)",
        "has_all = True",
    ),
    "what another server has is not in doubt": Mutant(
        "streamadv/producer/resend.py", "sent.server_id != servers[sent.shard]]", "sent.server_id is None]"
    ),
    "a producer does not say that it goes": Mutant(
        "streamadv/producer/logic.py", "elif has_all and membership.closed:", "elif False:"
    ),
    # Consumers and trainer
    "what was pending is not read again": Mutant(
        "streamadv/run/consumer.py", "    pending_from: str | None = FIRST\n",
        "    pending_from: str | None = None\n",
    ),
    "a lease never ends": Mutant(
        "streamadv/run/consumer.py", "while cursor.expired:", "while cursor.expired and False:"
    ),
    "a checkpoint does not know its groups": Mutant(
        "streamadv/batch/progress.py", '            "groups": self.groups,\n', '            "groups": [],\n'
    ),
    "groups in the weights are trained on again": Mutant(
        "streamadv/batch/progress.py",
        "return is_tried or known in self.uncommitted or known in self._committed or known in self._returning",
        "return False",
    ),
    "a group in hand is forgotten with its server": Mutant(
        "streamadv/batch/progress.py", "self._returning if self.uncommitted[group_id] < self._named_elsewhere else ", ""
    ),
    "a late heartbeat takes the end back": Mutant(
        "streamadv/producer/logic.py", "yield from membership.send_heartbeat()\n        manifest",
        "yield from membership.send_heartbeat(\"\" if membership.finished else \"open\")\n        manifest",
    ),
    "a commit is not repeated": Mutant(
        "streamadv/batch/recovery.py", "for k in [k for k in sorted(recorded) if k < below]:", "for k in list[int]():"
    ),
    # Members of groups
    "a late member counts nowhere": Mutant(
        f"{LUA}/group/take.lua",
        "for _, member in ipairs(members) do count('dropped:' .. (member.kind == 'usable' and late or member.kind), 1) end",
        "",
    ),
    "a group that has come in part is taken for whole": Mutant(
        f"{LUA}/group/take.lua", "  if #arrived.packets < #sent then arrived.size = 0 end\n", ""
    ),
    "a score that came first is not seen": Mutant(
        f"{LUA}/group/take.lua", "if not reward then return 's' end", "if true then return 's' end"
    ),
    "a score for a waiting slot is not noted": Mutant(
        f"{LUA}/group/score.lua", "if letter == 's' then redis.call('RPUSH'", "if false then redis.call('RPUSH'"
    ),
    "a second score replaces the first": Mutant(
        f"{LUA}/group/score.lua", "redis.call('HSETNX', keys.group, 'score:' .. index, ARGV[4]) == 0",
        "redis.call('HSET', keys.group, 'score:' .. index, ARGV[4]) == 2",
    ),
    "what a scorer has passed on stays in its stream": Mutant(
        f"{LUA}/group/scored.lua", "    redis.call('XDEL', keys.stream, ARGV[at])\n", ""
    ),
    "a scorer passes on what another one has": Mutant(
        f"{LUA}/group/scored.lua", "    if entry then\n", "    if true then\n"
    ),
    "a scorer passes on what had the id before": Mutant(
        f"{LUA}/group/scored.lua", "if not entry or has_payload(entry[2], ARGV[at + 2]) then", "if true then"
    ),
    "an unscorable member stays among the open ones": Mutant(
        f"{LUA}/group/apply_scores.lua", "  count('open', -1)\n", ""
    ),
    "a group with its last score stays open": Mutant(
        f"{LUA}/group/apply_scores.lua", "  elseif is_complete(group) then\n", "  elseif false then\n"
    ),
    "a touch moves no deadline": Mutant(
        f"{LUA}/group/touch.lua", "redis.call('ZADD', keys.open, string.format('%.17g', deadline), ARGV[1])\n", ""
    ),
    "cancelled slots keep their room": Mutant(
        f"{LUA}/group/cancel.lua", "  reserve(group.slot_bytes, -#members)\n", ""
    ),
    "a cancelled slot can be filled": Mutant(
        f"{LUA}/group/cancel.lua", "  change(group, 'slots', group.slots)\n", ""
    ),
    "a group that is opened reserves no room": Mutant(
        f"{LUA}/lib/admit.lua", "  reserve(group.slot_bytes, spec.slots)\n", ""
    ),
    "a group that somebody else has is withdrawn": Mutant(
        f"{LUA}/group/withdraw.lua", "  if nonce ~= ARGV[2] then others[#others + 1] = nonce end\n", ""
    ),
    "a run that has ended opens groups": Mutant(
        f"{LUA}/lib/admit.lua", "if admission.finished and admission.is_new and spec.role ~= 'eval' then", "if false then"
    ),
    "groups of a lost producer count on": Mutant(
        f"{LUA}/group/abandon.lua", "    redis.call('HSET', group_hash, 'producer', '')\n", ""
    ),
    # Batches, again
    "a batch that is undone keeps its groups": Mutant(
        f"{LUA}/batch/unapply_batch.lua", "    redis.call('HDEL', keys.owners, flat[i])\n", ""
    ),
    "a batch that is undone keeps its record": Mutant(
        f"{LUA}/batch/unname_batch.lua", "redis.call('HDEL', keys.batches, ARGV[2])\n", ""
    ),
    "a dropped group is in flight": Mutant(
        f"{LUA}/batch/drop_groups.lua", "disown(keys.owners, entry)", "'grouped'"
    ),
    "results of a closed batch stay": Mutant(
        f"{LUA}/lib/close_batch.lua", "redis.call('XDEL', keys.results, entry) == 1 and redis", "redis"
    ),
    "an older session takes the run": Mutant(
        f"{LUA}/batch/take_epoch.lua", "founded >= tonumber(ARGV[5]) or ", ""
    ),
    "a session takes the run though an older one has committed since": Mutant(
        f"{LUA}/batch/take_epoch.lua", " or is_committed", ""
    ),
    "a session without a checkpoint takes prompts for set back": Mutant(
        f"{LUA}/batch/settled.lua", "if redis.call('HGET', keys.session, 'loaded') ~= '' then redis.call('HDEL', keys.session, 'set_back') end", "redis.call('HDEL', keys.session, 'set_back')"
    ),
    "a record below the version is the job's own": Mutant(
        "streamadv/batch/recovery.py", "return all(progress.has_committed(identity(each.group_id)) for each in _living(run, record))", "return True"
    ),
    "a new trainer forgets what was committed": Mutant(
        f"{LUA}/batch/take_epoch.lua", "ARGV[1] ~= '' and ARGV[1] or committed", "ARGV[1] ~= '' and ARGV[1] or '0'"
    ),
    "a work item of another batch is published": Mutant(
        f"{LUA}/batch/publish.lua", "not is_other_work(ARGV[2], ARGV[3]) and ", ""
    ),
    "a lease is taken over whatever has happened since": Mutant(
        f"{LUA}/consumer/reclaim.lua", "if there and there[2] == ARGV[i + 1] and tostring(there[4]) == ARGV[i + 2] then",
        "if there then",
    ),
    # Producer, again
    "a heartbeat takes the end back": Mutant(
        f"{LUA}/run/heartbeat.lua", "instance == holder and (state == 'finished' or state == 'serves')", "false"
    ),
    "a producer that has finished stays so on another server": Mutant(
        "streamadv/producer/logic.py", "self._resend.check(manifest.keys.shards, first=say_open)",
        "self._resend.check(manifest.keys.shards, first=lambda: iter(()))",
    ),
    "the last word goes out before what was lost": Mutant(
        "streamadv/producer/logic.py", "if has_all and membership.finished and not leaves:", "if membership.finished and not leaves:"
    ),
    "what was sent again is not kept for the next server": Mutant(
        "streamadv/producer/resend.py", "            sent.server_id, sent.when = servers[sent.shard], clock.now()\n",
        "            sent.server_id = servers[sent.shard]\n",
    ),
    "what is in doubt is forgotten": Mutant(
        "streamadv/producer/resend.py", "                if self._sent[0].server_id != servers[self._sent[0].shard]:\n                    return\n",
        "",
    ),
    "groups begun ahead are not withdrawn": Mutant(
        "streamadv/producer/logic.py", "        yield from self.admission.withdraw()\n", ""
    ),
    # Trainer, again
    "a session that lost its commit does not repeat it": Mutant(
        "streamadv/batch/recovery.py", "    _finish_commits(run, progress, recorded, progress.committed)  # commits that the server lost\n", ""
    ),
    "what a shard alone knows of a batch is not undone": Mutant(
        "streamadv/batch/recovery.py", "_owner_ids(run, shard)) - ids:", "_owner_ids(run, shard)) & set():"
    ),
    "a batch that misses groups is kept": Mutant(
        "streamadv/batch/recovery.py", "if k > next_k or missing(run, batch.record):", "if k > next_k:"
    ),
    "a naming that the server lost is not written again": Mutant(
        "streamadv/batch/recovery.py", "            name_batch(run, batch.record, progress.fence)\n", "            pass\n"
    ),
    "records of another branch are taken over": Mutant(
        "streamadv/batch/recovery.py", "    undo_batches(run, foreign_records, progress.fence)\n    for record", "    for record"
    ),
    "a commit is said before it is saved": Mutant(
        "streamadv/batch/progress.py", "        self.committed = max(self.committed, version)\n", "        self.committed = version\n"
    ),
    "the groups of a checkpoint are forgotten at the first look": Mutant(
        "streamadv/batch/progress.py", "returned = asked - RETURN_WINDOW_S if", "returned = asked if",
    ),
    # Consumers, again
    "a reply that was lost is not asked for again": Mutant(
        "streamadv/run/consumer.py", "            cursor.pending_from = FIRST  # a reply may have been lost\n", ""
    ),
    "what is in hand is taken in hand again": Mutant(
        "streamadv/run/consumer.py", "if (entry.shard, entry.id) not in self._in_hand]", "]"
    ),
    # Kept groups
    "what is kept is deleted": Mutant(
        f"{LUA}/batch/commit.lua", "if not (logged and keep_trained(", "if true or not (logged and keep_trained("
    ),
    "what is kept is swept": Mutant(
        f"{LUA}/lib/complete.lua",
        "    return count('live_bytes', -kept)\n", "    count('live_bytes', -kept)\n",
    ),
    "a commit keeps what is committed already": Mutant(
        f"{LUA}/batch/commit.lua",
        "  if kept == '?' then\n",
        "  if logged then keep_trained(logged[2]) end\n  if kept == '?' then\n",
    ),
    "a kept group is not counted": Mutant(
        f"{LUA}/lib/keep.lua",
        "  redis.pcall('HINCRBY', keys.ledger, 'kept_bytes', string.format('%d', bytes))\n", "",
    ),
    "what is trimmed stays": Mutant(
        f"{LUA}/lib/trim.lua", "      redis.call('RPUSH', keys.garbage, item)\n", ""
    ),
    "what the archive lacks is forgotten": Mutant(
        f"{LUA}/lib/trim.lua",
        "return archives and (redis.call('HGET', keys.trainer, 'archived') or '0') or '+'",
        "return '+'",
    ),
    "the mark moves before the file has its name": Mutant(
        "streamadv/archive/follow.py",
        "        self._finish_file()\n        to = self._read_to\n",
        "        to = self._read_to\n",
    ),
    "the archive writes again what its files have": Mutant(
        "streamadv/archive/follow.py",
        "later = [file for file in files if file.last > begin]",
        "later, files = [], []",
    ),
    "a dropped group is not kept": Mutant(
        f"{LUA}/lib/complete.lua", "if #packets > 0 and", "if #packets > 1 and"
    ),
}  # fmt: skip
_DONE_TWICE: Final = (
    "the trainer takes the first result of each work item, and deletes any other one when it reads it"
)
_HANDED_OFF_ONCE: Final = "two have the entry in hand, and one of them hands it off: the work is done twice, as after any lease that ends"
#: Name -> why no schedule can find it.
EQUIVALENT: Final[dict[str, str]] = {
    "what was pending is not read again": "a consumer has another name at each start, under which nothing is pending",
    "a producer does not say that it goes": "it counts as lost after 30 s, and the run ends that much later",
    "work is handed out twice": _DONE_TWICE,
    "results are published twice": _DONE_TWICE,
    "a lease is taken over whatever has happened since": _HANDED_OFF_ONCE,
    "what is in hand is taken in hand again": _HANDED_OFF_ONCE,
    "a reply that was lost is not asked for again": "its entries are pending under the consumer's own name, and it takes them over once their lease ends",
    "nobody is told that there is room": "who waits for room asks again by itself after a pause, so it waits a pause longer",
    "a group that has come in part is taken for whole": "a usable packet is passed over if its payload is gone, and then no group is taken for whole, or if another grouper has taken it, which the group's slots say",
    "a prompt whose group is lost does not end with its commit": "until an hour after its commit the trainer knows the group, and ends its prompt at the end of the run; no schedule is as long (a test is)",
    "a dropped group is in flight": "what is dropped is a candidate, and a candidate has no owner: a batch that had it was undone before",
    "a batch is named twice": "rank 0 names one again in its epoch only if the reply was lost, and goes on with the record that stands; other ranks have a batch when its results are there",
    "a late heartbeat takes the end back": "a producer that lives says the end again within 10 s, and the world drops what is under way on a connection that is closed",
    "a producer that has finished stays so on another server": "one server loses the word with the pushes before it: it takes a cluster, or a producer that goes on after it has finished, and the world has neither",
    "a commit is said before it is saved": "rank 0 commits later versions only, and other ranks only show the number",
}

#: Name -> the schedule in `found` that finds it; seeds did not, or rarely.
KEPT: Final[dict[str, str]] = {
    "prompts that were set back wait for no producer": "a_run_goes_back_after_its_producers_have_ended",
    "a prompt that was left out is played after a lost answer": "a_prompt_left_out_is_asked_for_again",
    "a prompt ends with a copy of its uncommitted group": "a_trained_prompt_is_uncommitted_when_its_job_ends",
    "a scorer passes on what had the id before": "a_scorer_has_what_had_the_id_before",
    "the grouper takes what had the id before": "a_grouper_has_what_had_the_id_before",
    "a work item of another batch is published": "a_worker_has_what_had_the_id_before",
    "records of another branch are taken over": "an_older_job_names_a_batch_that_its_successor_has_committed",
    "what a shard alone knows of a batch is not undone": "an_older_job_hands_out_work_late",
    "a group in hand is forgotten with its server": "a_group_in_hand_comes_back_much_later",
    "a session takes the run though an older one has committed since": "an_older_job_commits_while_its_successor_is_paused",
    "a session without a checkpoint takes prompts for set back": "a_job_dies_while_it_sets_prompts_back",
    "a record below the version is the job's own": "an_older_job_names_a_batch_that_its_successor_has_committed",
    "the last word goes out before what was lost": "the_last_word_waits_for_memory",
    "the archive writes again what its files have": "the_mark_of_the_archive_is_lost",
}
