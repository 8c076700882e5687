-- Rank 0 tells the other ranks that iteration ends before batch k.
-- KEYS  void, lineage
-- ARGV  epoch, k
-- Returns  1, or -1 when fenced
-- include fence
redis.call('DEL', KEYS[1])
if fenced(KEYS[2], ARGV[1]) then return -1 end
redis.call('HSET', KEYS[2], 'end', ARGV[2])
return 1
