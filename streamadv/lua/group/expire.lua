-- End groups whose deadline has passed, unless records pushed before the deadline still wait in the rollouts stream:
-- the grouper's own downtime must not lose anything. One call stops after the group with which it has reached
-- EXPIRE_SLOTS slots.
-- KEYS  void, open, rollouts, groups, ended, ended_before, ledger, garbage, malformed, sizes, group_hashes: group ...
-- ARGV  those of a policy (lib/complete), id of each group ...
-- Returns  {groups looked at, id, outcome, data source of each that has ended ...}
-- include clock
-- include ended
-- include malformed
-- include sizes
-- include complete
-- include broken
-- include holders
local EXPIRE_SLOTS = 1024
local BROKEN_SLOTS = 64  -- what a group counts for whose number of slots cannot be read
local policy = policy_of(ARGV, 1)
local now = now_ms()
local oldest = redis.call('XRANGE', keys.rollouts, '-', '+', 'COUNT', 1)
local waiting_since = oldest[1] and tonumber(string.match(oldest[1][1], '^(%d+)')) or now + 1

-- Take the group out of the open ones without a tombstone: nobody has pushed to it.
local function remove(id)
  redis.call('ZREM', keys.open, id)
  redis.call('DEL', keys.group)
end

local function remove_withdrawn(id)
  local group = redis.call('HMGET', keys.group, 'unfilled', 'slot_bytes', 'abandoned')
  remove(id)
  redis.pcall('HINCRBY', keys.ledger, 'groups_open', -1)
  give_back({unfilled = group[1], slot_bytes = group[2], abandoned = group[3]})
end

-- Returns how many slots the group had, its outcome and data source; 0 when it is not (or no longer) due.
local function expire(id)
  local deadline = tonumber(redis.call('ZSCORE', keys.open, id) or '')
  if not deadline then return 0 end
  local state, counts = group_state()
  if state == 'none' then  -- each group is opened and ended in one step, so none of the run has left this
    remove(id)
    note_malformed('open', id, 'there is no such group', '')
    return 1
  end
  if state == 'broken' then return BROKEN_SLOTS, end_broken(id, policy) end
  if is_withdrawn(keys.group) then
    remove_withdrawn(id)
    return 1
  end
  if deadline > now or waiting_since <= deadline then return 0 end
  return counts.slots, end_group(id, short_outcome(counts.usable, policy, 'expired'), 'e', policy)
end

local reply, slots = {0}, 0
for i, group_hash in ipairs(keys.group_hashes) do
  keys.group = group_hash
  local more, outcome, data_source = expire(ARGV[POLICY_ARGS + i])
  slots, reply[1] = slots + more, i
  if outcome then
    reply[#reply + 1] = ARGV[POLICY_ARGS + i]
    reply[#reply + 1] = outcome
    reply[#reply + 1] = data_source
  end
  if slots >= EXPIRE_SLOTS then break end
end
return reply
