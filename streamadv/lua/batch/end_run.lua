-- Rank 0 tells the other ranks that iteration ends before batch k, and how often it has: a push opens the run again.
-- KEYS  void, lineage
-- ARGV  epoch, k, how often
-- Returns  1, or -1 when fenced
-- include fence
redis.call('DEL', KEYS[1])
if fenced(KEYS[2], ARGV[1]) then return -1 end
redis.call('HSET', KEYS[2], 'end', ARGV[2], 'ends', ARGV[3])
return 1
