-- The trainer's checkpoint contains every batch below `committed` and none from it on: first step of a commit.
-- KEYS  void, session
-- fenced by session
-- ARGV  epoch, committed
-- Returns  1
redis.call('HSET', keys.session, 'committed', ARGV[2])
return 1
