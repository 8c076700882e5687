-- A batch that misses groups is taken apart: what is left of it in this shard waits to be named again.
-- KEYS  void, trainer, applied, ledger, groups
-- ARGV  epoch, batch id, then for each group of it in this shard: entry id, trajectories
-- Returns  1, 0 when it was not applied, -1 when fenced
-- include fence
redis.call('DEL', KEYS[1])
if fenced(KEYS[2], ARGV[1]) then return -1 end
if redis.call('HDEL', KEYS[3], ARGV[2]) == 0 then return 0 end
local count = 0
for i = 3, #ARGV, 2 do
  if #redis.call('XRANGE', KEYS[5], ARGV[i], ARGV[i]) > 0 then count = count + tonumber(ARGV[i + 1]) end
end
redis.call('HINCRBY', KEYS[4], 'grouped', string.format('%d', count))
redis.call('HINCRBY', KEYS[4], 'in_flight', string.format('%d', -count))
return 1
