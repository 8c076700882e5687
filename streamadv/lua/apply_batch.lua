-- What a named batch means for a shard: its groups are in flight, advantage workers get their work. Done once for
-- each batch id. Groups the log no longer has (dead letters, or the server has lost them) are not counted.
-- KEYS  void, trainer, applied, ledger, work, groups
-- ARGV  epoch, batch id, number of groups of the batch in this shard, then for each of them: entry id, trajectories;
--       then units of work JSON ...
-- Returns  1, 0 when it was applied before, -1 when fenced
-- include fence
redis.call('DEL', KEYS[1])
if fenced(KEYS[2], ARGV[1]) then return -1 end
local work, count = 4 + 2 * tonumber(ARGV[3]), 0
if redis.call('HSETNX', KEYS[3], ARGV[2], table.concat(ARGV, ' ', 4, work - 1)) == 0 then return 0 end
for i = 4, work - 1, 2 do
  if #redis.call('XRANGE', KEYS[6], ARGV[i], ARGV[i]) > 0 then count = count + tonumber(ARGV[i + 1]) end
end
redis.call('HINCRBY', KEYS[4], 'grouped', string.format('%d', -count))
redis.call('HINCRBY', KEYS[4], 'in_flight', string.format('%d', count))
for i = work, #ARGV do redis.call('XADD', KEYS[5], '*', 'work', ARGV[i]) end
return 1
