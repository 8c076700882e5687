-- The last step of taking a run: the other ranks of the job may join from now on.
-- KEYS  void, session
-- fenced by session
-- ARGV  epoch, running moments JSON to go on from ('' = none)
-- Returns  1
if ARGV[2] == '' then redis.call('HDEL', keys.session, 'running') else redis.call('HSET', keys.session, 'running', ARGV[2]) end
redis.call('HSET', keys.session, 'settled', ARGV[1])
return 1
