-- A rank cannot read a trajectory of its part of a named batch and leaves it out: commit counts it as dead instead of
-- trained. Its group's dead letter says why at once, and has no payloads, as the other members are trained on.
-- KEYS  void, trainer, groups, dead, hash of the dead group, applied
-- ARGV  epoch, entry id, group id, rollout index, batch id, reason, detail
-- Returns  1, also when it is left out already; 0 when the shard has no such batch or entry (any more); -1 when fenced
-- include clock
-- include fence
-- include dead_letter
redis.call('DEL', KEYS[1])
if fenced(KEYS[2], ARGV[1]) then return -1 end
local found = redis.call('XRANGE', KEYS[3], ARGV[2], ARGV[2])
if #found == 0 or redis.call('HEXISTS', KEYS[6], ARGV[5]) == 0 then return 0 end
local field = 'left_out:' .. ARGV[5]
local known = redis.call('HGET', KEYS[6], field) or ''
local line = ARGV[2] .. ' ' .. ARGV[4] .. '\n'
if string.find('\n' .. known, '\n' .. line, 1, true) then return 1 end
redis.call('HSET', KEYS[6], field, known .. line)
if string.find('\n' .. known, '\n' .. ARGV[2] .. ' ', 1, true) then
  redis.call('HINCRBY', KEYS[5], 'count', 1)
else
  write_dead_letter({dead = KEYS[4], dead_group = KEYS[5]}, ARGV[3], found[1][2], ARGV[6], ARGV[7], 1, 0)
  empty_letter({dead = KEYS[4], dead_group = KEYS[5]}, ARGV[3])
end
return 1
