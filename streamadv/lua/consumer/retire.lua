-- Remove consumers that have nothing pending and leave, or have been silent for long. The check is in the same step, because
-- deleting a consumer deletes what is pending for it. The caller counts as heard of: a read that only waits for new
-- entries tells servers before 7.2 nothing.
-- KEYS  void, stream: rollouts | scoring | work
-- ARGV  consumer group, silent for at least (ms), the consumer that calls, '1' if it leaves ('' = it stays)
-- Returns  number of consumers removed
if ARGV[4] ~= '1' then
  redis.pcall('XREADGROUP', 'GROUP', ARGV[1], ARGV[3], 'COUNT', 1, 'STREAMS', keys.stream, '18446744073709551615-0')
end
local removed = 0
local consumers = redis.pcall('XINFO', 'CONSUMERS', keys.stream, ARGV[1])
if consumers.err then return 0 end  -- no such stream or group yet
for _, info in ipairs(consumers) do
  local consumer = {}
  for i = 1, #info, 2 do consumer[info[i]] = info[i + 1] end
  local is_caller = consumer.name == ARGV[3]
  local is_over = is_caller and ARGV[4] == '1' or not is_caller and consumer.idle >= tonumber(ARGV[2])
  if consumer.pending == 0 and is_over then
    redis.call('XGROUP', 'DELCONSUMER', keys.stream, ARGV[1], consumer.name)
    removed = removed + 1
  end
end
return removed
