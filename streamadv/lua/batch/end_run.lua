-- Rank 0 writes for the other ranks that iteration ends before batch k, and how often it has: a push opens the run again.
-- KEYS  void, session
-- fenced by session
-- ARGV  fence, k, how often, ids of the servers on which it ends ('' = as noted before)
-- Returns  1
redis.call('HSET', keys.session, 'end', ARGV[2], 'ends', ARGV[3])
if ARGV[4] ~= '' then redis.call('HSET', keys.session, 'servers', ARGV[4]) end
return 1
