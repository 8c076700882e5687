-- The trainer's checkpoint contains every batch below `committed` and none from it on: first step of a commit.
-- KEYS  void, lineage
-- ARGV  epoch, committed
-- Returns  1, or -1 when fenced
-- include fence
redis.call('DEL', KEYS[1])
if fenced(KEYS[2], ARGV[1]) then return -1 end
redis.call('HSET', KEYS[2], 'committed', ARGV[2])
return 1
