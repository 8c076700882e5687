-- How many groups of a shard count in pacing. Changes nothing.
-- KEYS  open, groups, ledger, trainer
-- Returns  that number
-- include pacing
local counted = redis.call('HMGET', keys.ledger, 'groups_eval', 'groups_abandoned')
return groups_ahead(redis.call('HMGET', keys.trainer, 'held')[1], counted[1], counted[2])
