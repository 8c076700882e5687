-- Take producers off the list, unless they have been heard of meanwhile.
-- KEYS  void, producers
-- ARGV  producer, its heartbeat as it was read, ...
-- Returns  number of producers taken off
local removed = 0
for i = 1, #ARGV, 2 do
  if redis.call('HGET', keys.producers, ARGV[i]) == ARGV[i + 1] then
    removed = removed + redis.call('HDEL', keys.producers, ARGV[i])
  end
end
return removed
