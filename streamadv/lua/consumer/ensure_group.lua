-- Create a consumer group that reads its stream from the beginning; existing ones stay as they are.
-- KEYS  void, stream: rollouts | scoring | work
-- ARGV  consumer group
-- Returns  1 when created, 0 when it was there
if redis.call('EXISTS', keys.stream) == 1 then
  for _, info in ipairs(redis.call('XINFO', 'GROUPS', keys.stream)) do
    for i = 1, #info, 2 do
      if info[i] == 'name' and info[i + 1] == ARGV[1] then return 0 end
    end
  end
end
redis.call('XGROUP', 'CREATE', keys.stream, ARGV[1], '0', 'MKSTREAM')
return 1
