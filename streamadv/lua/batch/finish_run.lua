-- The trainer ends the run in a shard: no training group is begun any more until a trainer takes the run again.
-- KEYS  void, trainer, admission
-- fenced by trainer
-- ARGV  fence
-- Returns  1
-- include announce
redis.call('HSET', keys.trainer, 'finished', 1)
announce()
return 1
