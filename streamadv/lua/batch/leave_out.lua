-- A rank cannot read a trajectory of its part of a named batch and leaves it out: commit counts it as dead instead of
-- trained. Its group's dead letter says why at once, and has no payloads, as the other members are trained on.
-- KEYS  void, trainer, groups, dead, dead_group, applied
-- fenced by trainer
-- ARGV  epoch, entry id, group id, rollout index, batch id, reason, detail
-- Returns  1, also when it is left out already; 0 when the shard has no such batch or entry (any more)
-- include clock
-- include dead_letter
local found = redis.call('XRANGE', keys.groups, ARGV[2], ARGV[2])
if #found == 0 or redis.call('HEXISTS', keys.applied, ARGV[5]) == 0 then return 0 end
local field = 'left_out:' .. ARGV[5]
local known = redis.call('HGET', keys.applied, field) or ''
local line = ARGV[2] .. ' ' .. ARGV[4] .. '\n'
if string.find('\n' .. known, '\n' .. line, 1, true) then return 1 end
redis.call('HSET', keys.applied, field, known .. line)
if string.find('\n' .. known, '\n' .. ARGV[2] .. ' ', 1, true) then
  redis.call('HINCRBY', keys.dead_group, 'count', 1)
else
  write_dead_letter(keys, ARGV[3], found[1][2], ARGV[6], ARGV[7], 1, 0)
  empty_letter(keys, ARGV[3])
end
return 1
