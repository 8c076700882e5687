-- End groups whose deadline has passed, unless packets pushed before the deadline still wait in the rollouts stream:
-- the grouper's own downtime must not lose anything. One call stops after the group with which it has reached
-- EXPIRE_SLOTS slots.
-- KEYS  void, open, rollouts, groups, ended, ended_before, ledger, garbage, malformed, sizes, evals, kept,
--       trainer, prompt_ends, group_hashes: group ...
-- ARGV  those of a policy (lib/close), id of each group ...
-- Returns  {groups looked at, id, outcome, data source, rewards of each that has ended ...}
-- include clock
-- include close
-- include complete
-- include broken
local EXPIRE_SLOTS = 1024
local FARTHEST_MS = 2 * 30 * 86400 * 1000  -- no process of the run gives a group so long
local BROKEN_SLOTS = 64  -- what a group counts for whose slot map cannot be read
local policy = policy_of(ARGV, 1)
local server_ms = now_ms()
local now = shard_ms(redis.call('HGET', keys.trainer, 'clock'), server_ms)
local oldest = redis.call('XRANGE', keys.rollouts, '-', '+', 'COUNT', 1)
local pushed_ms = oldest[1] and tonumber(string.match(oldest[1][1], '^(%d+)'))
local waiting_since = pushed_ms and now - math.max(0, server_ms - pushed_ms) or now + 1

-- Returns how many slots the group had, and what end_group returns; 0 when it is not (or no longer) due.
local function expire(group)
  local deadline = tonumber(redis.call('ZSCORE', keys.open, group.id) or '')
  if not deadline then return 0 end
  if group.state == 'none' then  -- each group is opened and ended in one step, so none of the run has left this
    redis.call('ZREM', keys.open, group.id)
    redis.call('DEL', group.hash)
    note_malformed('open', group.id, 'there is no such group', '')
    return 1
  end
  if group.state == 'broken' then return BROKEN_SLOTS, end_broken(group, policy) end
  if is_withdrawn(group) then  -- no tombstone: nobody has pushed to it
    remove_group(group)
    return 1
  end
  if deadline <= now + FARTHEST_MS and (deadline > now or waiting_since <= deadline) then return 0 end
  count_slots(group)
  if is_complete(group) then return #group.slots, complete(group, policy) end
  if lacks_columns(group) then return #group.slots, end_group(group, 'expired', 'e', policy) end
  return #group.slots, end_group(group, short_outcome(group.usable, policy, 'expired'), 'e', policy)
end

local reply, slots = {0}, 0
for i, hash in ipairs(keys.group_hashes) do
  local id = ARGV[POLICY_ARGS + i]
  local more, outcome, data_source, rewards = expire(load_group(id, hash))
  slots, reply[1] = slots + more, i
  if outcome then
    local n = #reply
    reply[n + 1], reply[n + 2], reply[n + 3], reply[n + 4] = id, outcome, data_source, rewards
  end
  if slots >= EXPIRE_SLOTS then break end
end
write_figures()
return reply
