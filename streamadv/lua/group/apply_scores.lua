-- The grouper fills in rewards that `producer.score` brought for members it had taken before, and ends their groups if
-- those were the last ones missing.
-- KEYS  void, scored, open, groups, ended, ended_before, ledger, garbage, sizes, group_hashes: group ...
-- ARGV  those of a policy (lib/complete), then items as they stand in the list: '<index> <group id>' ...
-- Returns  {outcome, data source, ...} of the groups that have ended
-- include ended
-- include sizes
-- include complete
local policy = policy_of(ARGV, 1)

-- Give the member its reward, or end its slot as unscorable.
local function fill_in(index)
  local text, value = unpack(redis.call('HMGET', keys.group, index, 'score_value:' .. index))
  local reward, bytes, key, role, reference = member_fields(text or '')
  if reward ~= '-' or not value then return end
  redis.call('HINCRBY', keys.group, 'unscored', -1)
  if value == 'x' then
    redis.call('HSET', keys.group, index, 'x')
    redis.call('HINCRBY', keys.group, 'unusable', 1)
    redis.pcall('HINCRBY', keys.ledger, 'open', -1)
    redis.pcall('HINCRBY', keys.ledger, 'dropped:unscorable', 1)
    redis.call('RPUSH', keys.garbage, key .. ' ' .. bytes)
  else
    redis.call('HSET', keys.group, index, member_text(value, bytes, key, role, reference))
    redis.call('HINCRBY', keys.group, 'usable', 1)
  end
end

local ended = {}
for i = POLICY_ARGS + 1, #ARGV do
  if redis.call('LREM', keys.scored, 1, ARGV[i]) == 1 then
    local index, id = string.match(ARGV[i], '^(%d+) (.+)$')
    keys.group = keys.group_hashes[i - POLICY_ARGS]
    if group_state() == 'open' then
      fill_in(index)
      local _, counts = group_state()
      if counts and is_complete(counts) then
        local outcome, data_source = complete(id, counts, policy)
        ended[#ended + 1] = outcome
        ended[#ended + 1] = data_source
      end
    end
  end
end
return ended
