-- Note why the chain of a work item fails, until an item is published or a trainer takes the run.
-- KEYS  void, work, applied, trainer
-- ARGV  entry id, batch id, why
-- Returns  1, 0 when the item is finished or its batch is gone
if #redis.call('XRANGE', keys.work, ARGV[1], ARGV[1]) == 0 then return 0 end
if redis.call('HEXISTS', keys.applied, ARGV[2]) == 0 then return 0 end
redis.call('HSET', keys.trainer, 'failing', ARGV[3])
return 1
