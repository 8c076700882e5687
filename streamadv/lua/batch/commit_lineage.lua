-- The trainer's checkpoint contains every batch below `committed` and none from it on: first step of a commit.
-- KEYS  void, lineage
-- fenced by lineage
-- ARGV  epoch, committed
-- Returns  1
redis.call('HSET', keys.lineage, 'committed', ARGV[2])
return 1
