-- Delete the payloads of a dead group; with 'purge' also what is known of it. It stays counted as dead.
-- KEYS  void, ledger, dead, hash of the dead group, garbage
-- ARGV  group id, 'purge' or 'keep'
-- Returns  1, or 0 when there was nothing to do
redis.call('DEL', KEYS[1])
local group = redis.call('HMGET', KEYS[4], 'emptied', 'bytes', 'log:payloads')
if not string.match(group[2] or '', '^%d+$') then return 0 end
if not group[1] then
  redis.call('HSET', KEYS[4], 'emptied', 1)
  for item in string.gmatch(group[3] or '', '[^\n]+') do redis.call('RPUSH', KEYS[5], item) end
  redis.call('HINCRBY', KEYS[2], 'dead_bytes', string.format('%d', -tonumber(group[2])))
  redis.call('HINCRBY', KEYS[2], 'live_bytes', group[2])
elseif ARGV[2] == 'keep' then
  return 0
end
if ARGV[2] == 'purge' then
  redis.call('DEL', KEYS[4])
  redis.call('ZREM', KEYS[3], ARGV[1])
end
return 1
