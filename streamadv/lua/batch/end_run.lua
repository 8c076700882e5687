-- Rank 0 writes for the other ranks that iteration ends before batch k, and how often it has: a push opens the run again.
-- KEYS  void, session
-- fenced by session
-- ARGV  epoch, k, how often
-- Returns  1
redis.call('HSET', keys.session, 'end', ARGV[2], 'ends', ARGV[3])
return 1
