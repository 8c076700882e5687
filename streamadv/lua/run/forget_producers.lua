-- Remove producers from the list, except those that have sent a heartbeat since the caller read it.
-- KEYS  void, producers
-- ARGV  producer, its heartbeat as it was read, ...
-- Returns  number of producers removed
local removed = 0
for i = 1, #ARGV, 2 do
  if redis.call('HGET', keys.producers, ARGV[i]) == ARGV[i + 1] then
    removed = removed + redis.call('HDEL', keys.producers, ARGV[i])
  end
end
return removed
