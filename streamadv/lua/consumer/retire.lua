-- Remove consumers that have nothing pending and have been silent for long. The check is in the same step, because
-- deleting a consumer deletes what is pending for it.
-- KEYS  void, stream: rollouts | scoring | work
-- ARGV  consumer group, silent for at least (ms), consumer to keep
-- Returns  number of consumers removed
local removed = 0
local consumers = redis.pcall('XINFO', 'CONSUMERS', keys.stream, ARGV[1])
if consumers.err then return 0 end  -- no such stream or group yet
for _, info in ipairs(consumers) do
  local consumer = {}
  for i = 1, #info, 2 do consumer[info[i]] = info[i + 1] end
  if consumer.pending == 0 and consumer.idle >= tonumber(ARGV[2]) and consumer.name ~= ARGV[3] then
    redis.call('XGROUP', 'DELCONSUMER', keys.stream, ARGV[1], consumer.name)
    removed = removed + 1
  end
end
return removed
