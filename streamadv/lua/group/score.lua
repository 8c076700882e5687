-- A reward brought by `producer.score`: kept in the group for the packet on its way, or for the grouper to apply.
-- KEYS  void, group, ended, ended_before, scored
-- ARGV  group id, index, reward ('' = unscorable), score JSON
-- Returns  'scored', 'duplicate' (it had a reward), 'ended' (the group had ended) or 'unknown' (no such group or slot)
-- include ended
local id, index, reward = ARGV[1], ARGV[2], ARGV[3]
local reply = redis.pcall('HMGET', keys.group, 'slots')
if reply.err then return 'unknown' end
local slots = reply[1]
if not slots then return find_ended(id) and 'ended' or 'unknown' end
if tonumber(index) < 0 or tonumber(index) >= #slots then return 'unknown' end
local letter = string.sub(slots, index + 1, index + 1)
if letter == 'u' or redis.call('HSETNX', keys.group, 'score:' .. index, ARGV[4]) == 0 then return 'duplicate' end
redis.call('HSET', keys.group, 'score_value:' .. index, reward == '' and 'x' or reward)
if letter == 's' then redis.call('RPUSH', keys.scored, index .. ' ' .. id) end
return 'scored'
