-- How many groups of a shard count in pacing. Changes nothing.
-- KEYS  open, groups, ledger, trainer
-- Returns  that number
-- include admit
return groups_ahead({open = KEYS[1], groups = KEYS[2], ledger = KEYS[3]}, redis.call('HMGET', KEYS[4], 'held')[1])
