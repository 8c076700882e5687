-- How many groups of a shard count in pacing. Changes nothing.
-- KEYS  open, groups, ledger, trainer
-- Returns  that number
-- include pacing
return groups_ahead(redis.call('HMGET', keys.trainer, 'held')[1])
