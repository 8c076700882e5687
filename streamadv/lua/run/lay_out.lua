-- A process that has read the manifest confirms to a shard how many shards the run has: see `lua/lib/admit.lua`.
-- KEYS  void, ledger
-- ARGV  shards
-- Returns  1
local there = redis.call('HMGET', keys.ledger, 'shards')[1] or '0'
local back = string.sub(there, 1, 1) == '-' and string.sub(there, 2) or '-' .. there  -- as text: it may be any number
redis.pcall('HINCRBY', keys.ledger, 'shards', back)
redis.pcall('HINCRBY', keys.ledger, 'shards', ARGV[1])
return 1
