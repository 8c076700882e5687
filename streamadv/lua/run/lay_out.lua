-- A process that has read the manifest confirms to a shard how many shards the run has: see `lua/lib/admit.lua`.
-- KEYS  void, ledger
-- ARGV  shards
-- Returns  1
local old = redis.call('HMGET', keys.ledger, 'shards')[1] or '0'
local minus_old = string.sub(old, 1, 1) == '-' and string.sub(old, 2) or '-' .. old  -- as text: it may be any number
redis.pcall('HINCRBY', keys.ledger, 'shards', minus_old)
redis.pcall('HINCRBY', keys.ledger, 'shards', ARGV[1])
return 1
