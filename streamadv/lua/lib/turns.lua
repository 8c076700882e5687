-- The turns of a rollout that a gateway plays: what its agent has seen so far. Fields of the group's hash, so that they
-- go with it:
--   'turned'              '1' once a slot has had turns
--   'turns:<slot>'        '<turns> <their bytes>'
--   'turn:<slot>:<n>'     the n-th, from 0 on, as `gateway/turns.py` packs it
-- A slot that ends has none. They count in no counter: what is reserved for the free slot is for them.

-- How many turns a slot has, and their bytes.
local function turns_of(group, slot)
  local count, bytes = string.match(redis.call('HGET', group.hash, 'turns:' .. slot) or '', '^(%d+) (%d+)$')
  return tonumber(count or 0), tonumber(bytes or 0)
end

local function drop_turns(group, slot)
  local count = turns_of(group, slot)
  for n = 0, math.min(count, redis.call('HLEN', group.hash)) - 1 do
    redis.call('HDEL', group.hash, 'turn:' .. slot .. ':' .. n)
  end
  redis.call('HDEL', group.hash, 'turns:' .. slot)
end
