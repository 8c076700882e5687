-- Rank 0 writes for the other ranks that iteration ends before batch k, and how often it has: a push opens the run again.
-- KEYS  void, lineage
-- fenced by lineage
-- ARGV  epoch, k, how often
-- Returns  1
redis.call('HSET', keys.lineage, 'end', ARGV[2], 'ends', ARGV[3])
return 1
