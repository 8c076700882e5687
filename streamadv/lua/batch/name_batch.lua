-- Write the record of batch k, once: the one point where anything of batch scope is decided.
-- KEYS  void, session, batches
-- fenced by session
-- ARGV  fence, k, record JSON, running moments JSON with this batch ('' = none)
-- Returns  1, 0 when batch k has a record
if redis.call('HSETNX', keys.batches, ARGV[2], ARGV[3]) == 0 then return 0 end
if ARGV[4] ~= '' then redis.call('HSET', keys.session, 'running', ARGV[4]) end
redis.call('HDEL', keys.session, 'end', 'ends')
return 1
