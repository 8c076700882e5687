-- The last step of taking a run: the other ranks of the job may join from now on.
-- KEYS  void, session
-- fenced by session
-- ARGV  fence, running moments JSON to go on from ('' = none), ids of the batches that the job has named and taken back,
--       ids of the servers that have heard every producer ('' = as noted before)
-- Returns  1
if ARGV[2] == '' then redis.call('HDEL', keys.session, 'running') else redis.call('HSET', keys.session, 'running', ARGV[2]) end
if redis.call('HGET', keys.session, 'loaded') ~= '' then redis.call('HDEL', keys.session, 'set_back') end
redis.call('HSET', keys.session, 'settled', ARGV[1], 'taken_back', ARGV[3])
if ARGV[4] ~= '' then redis.call('HSET', keys.session, 'servers', ARGV[4]) end
return 1
