-- A reward brought by `producer.score`: kept in the group for the record on its way, or for the grouper to apply.
-- KEYS  void, group, ended, ended_before, scored
-- ARGV  group id, index, reward ('' = unscorable), score JSON
-- Returns  'scored', 'duplicate' (it had a reward), 'ended' (the group had ended) or 'unknown' (no such group or slot)
-- include ended
local id, index, reward = ARGV[1], ARGV[2], ARGV[3]
local group = redis.pcall('HMGET', keys.group, 'slots', index)
if group.err then return 'unknown' end
local slots, member = tonumber(group[1] or ''), group[2]
if not slots then
  local ended = not group[1] and find_ended(id)
  return ended and 'ended' or 'unknown'
end
if tonumber(index) < 0 or tonumber(index) >= slots then return 'unknown' end
local usable = member and string.sub(member, 1, 1) == 'u'
if usable and string.sub(member, 1, 4) ~= 'u - ' then return 'duplicate' end
if redis.call('HSETNX', keys.group, 'score:' .. index, ARGV[4]) == 0 then return 'duplicate' end
redis.call('HSET', keys.group, 'score_value:' .. index, reward == '' and 'x' or reward)
if usable then redis.call('RPUSH', keys.scored, index .. ' ' .. id) end
return 'scored'
