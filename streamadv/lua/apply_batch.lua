-- What a named batch means for a shard: its groups are in flight, advantage workers get their work. Done once for
-- each batch id.
-- KEYS  void, trainer, applied, ledger, work
-- ARGV  epoch, batch id, trajectories of the batch in this shard, groups of it in this shard, work entries JSON ...
-- Returns  1, 0 when it was applied before, -1 when fenced
-- include fence
redis.call('DEL', KEYS[1])
if fenced(KEYS[2], ARGV[1]) then return -1 end
if redis.call('HSETNX', KEYS[3], ARGV[2], ARGV[4]) == 0 then return 0 end
redis.call('HINCRBY', KEYS[4], 'grouped', string.format('%d', -tonumber(ARGV[3])))
redis.call('HINCRBY', KEYS[4], 'in_flight', ARGV[3])
for i = 5, #ARGV do redis.call('XADD', KEYS[5], '*', 'work', ARGV[i]) end
return 1
