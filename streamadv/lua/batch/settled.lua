-- The last step of taking a run: the other ranks of the job may join from now on.
-- KEYS  void, lineage
-- fenced by lineage
-- ARGV  epoch, running moments JSON to go on from ('' = none)
-- Returns  1
if ARGV[2] == '' then redis.call('HDEL', keys.lineage, 'running') else redis.call('HSET', keys.lineage, 'running', ARGV[2]) end
redis.call('HSET', keys.lineage, 'settled', ARGV[1])
return 1
