-- A reward brought by `producer.score`: kept in the group for the record on its way, or for the grouper to apply.
-- KEYS  void, group, ended, ended_before, scored
-- ARGV  group id, index, reward ('' = unscorable), score JSON
-- Returns  'scored', 'duplicate' (it had a reward), 'ended' (the group had ended) or 'unknown' (no such group or slot)
-- include ended
local group, id, index, reward = keys.group, ARGV[1], ARGV[2], ARGV[3]
local there = redis.pcall('HMGET', group, 'slots', index)
if there.err then return 'unknown' end
local slots, text = tonumber(there[1] or ''), there[2]
if not slots then
  if there[1] then return 'unknown' end
  return find_ended(keys, id) and 'ended' or 'unknown'
end
if tonumber(index) < 0 or tonumber(index) >= slots then return 'unknown' end
local usable = text and string.sub(text, 1, 1) == 'u'
if usable and string.sub(text, 1, 4) ~= 'u - ' then return 'duplicate' end
if redis.call('HSETNX', group, 'score:' .. index, ARGV[4]) == 0 then return 'duplicate' end
redis.call('HSET', group, 'score_value:' .. index, reward == '' and 'x' or reward)
if usable then redis.call('RPUSH', keys.scored, index .. ' ' .. id) end
return 'scored'
