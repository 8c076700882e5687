-- A process that has read the manifest confirms to a shard how many shards the run has: see `lua/lib/admit.lua`.
-- KEYS  void, ledger
-- ARGV  shards
-- Returns  1
redis.call('DEL', KEYS[1])
local there = tonumber(redis.call('HMGET', KEYS[2], 'shards')[1] or '') or 0
redis.call('HINCRBY', KEYS[2], 'shards', string.format('%d', tonumber(ARGV[1]) - there))
return 1
